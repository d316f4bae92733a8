// What the page shows, in words.
"use strict";
(() => {
  const MOST = 8; // chunks that are named

  /** The window is the one in force; the model's own stands beside it where it is another. */
  lce.about = ({ model, tokens, runs: [{ window }] }) =>
    [
      model.name,
      `${lce.some(model.layers, "layer")} × ${lce.some(model.heads, "head")}`,
      `window of ${lce.number(window)}${window === model.window ? "" : ` (the model’s is ${lce.number(model.window)})`}`,
      lce.some(tokens.length, "token"),
    ].join(" · ");

  /** A run's name, with its heads that are off. */
  lce.named = (run) => (run.offKeys.size ? `${run.label}, ${lce.some(run.offKeys.size, "head")} off` : run.label);

  lce.wrote = (token, g) => {
    const likely = token.logprob == null ? "" : `, log-probability ${token.logprob.toFixed(2)}`;
    return `Generated token ${g + 1}, “${token.text}”${likely}: go to the query that wrote it`;
  };

  /** The share of full attention's bytes that a query reads; null without a closer look. */
  function ofFull(run, t) {
    const bytes = run.look(t)?.bytes;
    return bytes ? lce.share((bytes.read + bytes.scored) / bytes.full) : null;
  }

  /** A query's bytes and recall in a few words. */
  lce.told = (run, t) => {
    const share = ofFull(run, t);
    if (share === null) return "";
    const recall = lce.share(lce.recall(run, t));
    return `reading ${share} of full attention’s bytes, attending ${recall} of the true attention`;
  };

  /** What kind of query a token is. */
  lce.place = (run, t) => {
    if (t >= run.prompt) return `generated token ${t - run.prompt + 1} of ${run.generated.length}`;
    const blocks = run.raw.blocks.filter(([start]) => start < run.prompt).length;
    return `token ${lce.number(t)} of ${lce.number(run.prompt)} · prefill block ${run.blockOf(t) + 1} of ${blocks}`;
  };

  /** One run's choices at a query, for a reader who does not see the pictures. */
  lce.summary = (run, token, layer, head, letter) => {
    const t = Math.min(token, run.queries - 1),
      chosen = run.chosen(t, layer, head),
      share = ofFull(run, t);
    const numbers = chosen.slice(0, MOST).map(String);
    if (chosen.length > MOST) numbers.push(`${chosen.length - MOST} more`);
    const chose = chosen.length
      ? `chose ${chosen.length === 1 ? run.word : `${run.word}s`} ${lce.list(numbers)}`
      : "chose nothing";
    const [, strong, words] = lce.verdict(run, t, layer, head);
    const bytes = share === null ? "" : ` It reads ${share} of full attention’s bytes.`;
    return `${letter}, ${lce.named(run)}: layer ${layer}, head ${head} ${chose}. ${strong} ${words}${bytes}`;
  };
})();
