// Layers × heads × chunks: what every head chose for one query.
"use strict";
(() => {
  const { el } = lce;
  const TOP = 2; // pixels above the first row, for the frame of the picked head
  const FAINT = 0.002; // true attention below which nothing is drawn where heads do not choose
  const NOTABLE = 0.02; // true attention from which a chunk that is not attended is drawn as missed

  /** The chunks with true attention that a head does not attend, as [chunk, mass, rank]; none without a closer look. */
  lce.missed = (run, t, layer, head, least = NOTABLE) => {
    const look = run.lookAt(t, layer, head);
    if (!look || !run.chooses(layer)) return [];
    return look.best.filter(
      ([c, mass, , chosen]) => mass >= least && !chosen && run.alwaysOf(t, layer, c) !== "always",
    );
  };

  class Heads {
    /** `pick(layer, head, chunk)` is called when a cell is clicked. */
    constructor(host, label, { pick }) {
      this.canvas = el("canvas", { class: "chart pick", tabindex: 0, role: "img" });
      this.note = el("p", { class: "note", "aria-hidden": "true" });
      this.label = label;
      this.pick = pick;
      this.box = el("div", { class: "over" }, this.canvas);
      host.append(this.box, this.note);
      this.canvas.addEventListener("pointermove", (event) => this.tell(this.cell(event)));
      this.canvas.addEventListener("pointerleave", () => this.tell(null));
      this.canvas.addEventListener("click", (event) => {
        const cell = this.cell(event);
        if (cell) pick(cell.layer, cell.head, cell.chunk);
      });
      this.canvas.addEventListener("keydown", (event) => {
        const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
        if (!step || !this.state) return;
        event.preventDefault();
        const { run, layer, head } = this.state,
          rows = run.model.layers * run.heads;
        const row = Math.max(0, Math.min(rows - 1, layer * run.heads + head + step));
        pick(Math.floor(row / run.heads), row % run.heads, null);
      });
    }

    measure() {
      const { run } = this.state,
        rows = run.model.layers * run.heads;
      this.gutter = 3.9 * lce.rem;
      this.gap = Math.max(2, Math.min(6, 60 / run.model.layers));
      this.row = Math.max(3, Math.min(0.95 * lce.rem, Math.floor((19 * lce.rem) / rows)));
      this.width = Math.max(180, this.box.clientWidth);
      this.plot = this.width - this.gutter - 4;
      this.bottom = TOP + run.model.layers * (run.heads * this.row + this.gap);
    }

    x(token) {
      return this.gutter + (token / this.state.run.tokens.length) * this.plot;
    }

    y(layer, head) {
      return TOP + layer * (this.state.run.heads * this.row + this.gap) + head * this.row;
    }

    cell(event) {
      if (!this.state) return null;
      const { run } = this.state,
        layer = Math.max(0, Math.floor((event.offsetY - TOP) / (run.heads * this.row + this.gap)));
      const head = Math.floor((event.offsetY - this.y(layer, 0)) / this.row);
      if (layer >= run.model.layers || head < 0 || head >= run.heads) return null;
      const token = ((event.offsetX - this.gutter) / this.plot) * run.tokens.length;
      return {
        layer,
        head,
        chunk: token >= 0 && token < run.tokens.length ? Math.max(0, run.chunkOf(Math.floor(token))) : null,
      };
    }

    tell(cell) {
      const { run, t } = this.state ?? {};
      if (!run) return;
      if (!cell) {
        this.note.textContent = this.rest;
        return;
      }
      const parts = [`Layer ${cell.layer}, head ${cell.head}`];
      if (cell.chunk !== null && cell.chunk < run.chunks) {
        const [start, stop] = run.range(cell.chunk),
          look = run.lookAt(t, cell.layer, cell.head);
        const best = look?.best.find(([c]) => c === cell.chunk),
          at = look ? look.chosen.indexOf(cell.chunk) : -1;
        const mass = best?.[1] ?? (at >= 0 ? look.mass[at] : undefined);
        parts.push(run.size === 1 ? `token ${start}` : `chunk ${cell.chunk}, tokens ${start} to ${stop - 1}`);
        if (run.chosen(t, cell.layer, cell.head).includes(cell.chunk)) parts.push("chosen");
        else if (start > t) parts.push("not read yet");
        else
          parts.push(
            { always: "always attended", partly: "attended in part" }[run.alwaysOf(t, cell.layer, cell.chunk)] ??
              "not chosen",
          );
        if (mass != null) parts.push(`true attention ${lce.share(mass)}`);
        parts.push(`“${run.words(cell.chunk)}”`);
      }
      this.note.textContent = parts.join(" · ");
    }

    draw(state) {
      this.state = state;
      this.measure();
      const { run, t } = state,
        c = lce.colours;
      const g = lce.canvas(this.canvas, this.width, this.bottom + 1.3 * lce.rem);
      const end = this.x(Math.min(t + 1, run.tokens.length));
      g.fillStyle = c.soft;
      for (let layer = 0; layer < run.model.layers; layer++)
        g.fillRect(this.gutter, this.y(layer, 0), end - this.gutter, run.heads * this.row);
      this.drawMarks(g);
      g.fillStyle = c.always;
      g.globalAlpha = 0.3;
      for (let layer = 0; layer < run.model.layers; layer++) {
        for (const [start, stop] of run.always(t, layer) ?? []) {
          g.fillRect(this.x(start), this.y(layer, 0), Math.max(1, this.x(stop) - this.x(start)), run.heads * this.row);
        }
      }
      g.globalAlpha = 1;
      for (let layer = 0; layer < run.model.layers; layer++) {
        g.fillStyle = layer === state.layer ? c.ink : c.muted;
        g.fillText(
          run.heads * this.row >= 9 || layer % 4 === 0 ? `layer ${layer}` : "",
          0,
          this.y(layer, 0) + (run.heads * this.row) / 2,
        );
        for (let head = 0; head < run.heads; head++) this.drawRow(g, layer, head);
      }
      this.drawAxis(g);
      g.strokeStyle = c.ink;
      g.lineWidth = 1.5;
      g.strokeRect(this.gutter - 1.5, this.y(state.layer, state.head) - 1, this.plot + 3, this.row + 1.5);
      this.describe();
    }

    drawRow(g, layer, head) {
      const { run, t } = this.state,
        y = this.y(layer, head),
        height = Math.max(1, this.row - (this.row > 4 ? 1 : 0));
      const c = lce.colours,
        look = run.lookAt(t, layer, head);
      if (run.isOff(layer, head)) {
        g.fillStyle = c.panel;
        g.fillRect(this.gutter, y, this.plot, height);
        g.strokeStyle = c.muted;
        g.lineWidth = 1;
        g.beginPath();
        g.moveTo(this.gutter, y + height / 2);
        g.lineTo(this.gutter + this.plot, y + height / 2);
        g.stroke();
        return;
      }
      const box = (chunk, least) => {
        const [start, stop] = run.range(chunk),
          from = this.x(start),
          wide = Math.max(least, this.x(Math.min(stop, t + 1)) - from);
        return [Math.min(from, this.gutter + this.plot - wide), y, wide, height];
      };
      const mass = new Map(look?.best.map(([chunk, share]) => [chunk, share]));
      look?.chosen.forEach((chunk, i) => mass.set(chunk, look.mass[i]));
      if (!run.chooses(layer)) {
        for (const [chunk, share] of mass) {
          if (share < FAINT) continue;
          g.fillStyle = lce.blue(0.15 + 0.85 * Math.sqrt(share));
          g.fillRect(...box(chunk, 2));
        }
        return;
      }
      for (const chunk of run.chosen(t, layer, head)) {
        g.fillStyle = lce.blue(look ? 0.3 + 0.7 * Math.sqrt(mass.get(chunk) ?? 0) : 0.65);
        g.fillRect(...box(chunk, 2));
      }
      g.strokeStyle = c.miss;
      g.lineWidth = this.row > 6 ? 2 : 1;
      for (const [chunk] of lce.missed(run, t, layer, head)) {
        const [x, top, wide, high] = box(chunk, 7);
        g.strokeRect(x + 1, top + g.lineWidth / 2, wide - 2, high - g.lineWidth);
      }
    }

    drawMarks(g) {
      const { run, t } = this.state;
      g.fillStyle = g.strokeStyle = lce.colours.mark;
      g.lineWidth = 1.5;
      for (const { start, stop } of run.marks) {
        if (start > t) continue;
        const from = this.x(start),
          wide = Math.max(4, this.x(stop) - from);
        g.globalAlpha = 0.3;
        g.fillRect(from - 2, 0, wide + 4, this.bottom);
        g.globalAlpha = 1;
        g.strokeRect(from - 2, 1, wide + 4, this.bottom - this.gap);
      }
    }

    drawAxis(g) {
      const n = this.state.run.tokens.length,
        y = this.bottom + 0.65 * lce.rem,
        parts = this.plot > 24 * lce.rem ? 4 : 2;
      g.fillStyle = lce.colours.muted;
      for (let i = 0; i <= parts; i++) {
        const token = Math.round((n * i) / parts);
        g.textAlign = i === 0 ? "left" : i === parts ? "right" : "center";
        g.fillText(i === 0 ? "token 0" : lce.number(token), this.x(token), y);
      }
      g.textAlign = "left";
    }

    describe() {
      const { run, t } = this.state,
        { counts, heads } = run.counts(t);
      const distinct = counts.reduce((sum, n) => sum + (n > 0), 0);
      let missing = 0;
      for (let layer = 0; layer < run.model.layers; layer++) {
        for (let head = 0; head < run.heads; head++) missing += lce.missed(run, t, layer, head, 0.1).length > 0;
      }
      const before = lce.number(Math.max(0, run.chunkOf(t)));
      const misses = missing ? lce.some(missing, "head misses", "heads miss") : "none misses";
      this.rest = run.choosing.length
        ? [
            `${lce.some(heads, "head")} chose ${lce.some(distinct, `different ${run.word}`)}`,
            ` of ${before} before this query`,
            run.look(t) ? `; ${misses} a ${run.word} with 10% or more of its true attention.` : ".",
          ].join("")
        : "This method chooses nothing: every head attends by the same rule. Blue is where the true attention is.";
      this.canvas.setAttribute("aria-label", `${this.label}. ${this.rest} Up and down arrow: the head before, after.`);
      this.note.textContent = this.rest;
    }
  }
  lce.Heads = Heads;
})();
