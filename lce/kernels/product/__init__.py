"""Products: `x [T, in] · weight [out, in]ᵀ + bias [out]`, `[T, out]`, and the operations around a product in a layer.

    x' = x / √(mean x² + eps) · norm        with a norm `[in]`
    y  = x' · weightᵀ + bias                sums are float32
    y  = gate(y[:, :out/2]) · y[:, out/2:]  with a gate, `[T, out/2]`
    out = onto + y, rounded once            with hidden states to add to

A row of the result has the same bits for any T and any number of threads. Multiplications: T · out · in. Bytes moved:
up to `MOST_ROWS` rows read the weights once, as they are stored; more rows read them once per `PANEL_COLUMNS` rows.

`products` multiplies the few rows of a step with plain weights, `quantised` with packed ones, by integers; `codes_body`
unpacks these. `panels` multiplies rows that are read, with weights of any kind, by `panels_body` and `few_rows_body`,
whose results have the same bits.
"""
