// The text: only the lines on screen are in the document, so 32,000 tokens scroll and answer as 300 do.
"use strict";
(() => {
  const { el } = lce;
  const measure = document.createElement("canvas").getContext("2d");

  /** Tokens cut into lines of `width` pixels: `lines[i]` is a list of [token, text shown]. */
  function broken(tokens, width, font) {
    measure.font = font;
    const known = new Map();
    const widthOf = (text) => {
      let found = known.get(text);
      if (found === undefined) known.set(text, (found = measure.measureText(text.replace(/\t/g, "    ")).width));
      return found;
    };
    const lines = [];
    let line = [],
      used = 0;
    const end = () => {
      lines.push(line);
      line = [];
      used = 0;
    };
    /** End the line before the word that does not fit: tokens of one word stay together. */
    const wrap = () => {
      let word = line.length - 1;
      while (word > 0 && !/^\s/.test(line[word][1]) && !/\s$/.test(line[word - 1][1])) word -= 1;
      const carried = word > 0 ? line.splice(word) : line.splice(line.length - 1);
      end();
      for (const [token, text] of carried) put(token, text);
    };
    const put = (token, text) => {
      const shown = line.length ? text : text.replace(/^ +(?=.)/, "");
      const wide = widthOf(shown);
      if (!line.length && wide > width && shown.length > 1) {
        const fits = Math.max(1, Math.floor((shown.length * width) / wide) - 1);
        line.push([token, shown.slice(0, fits)]);
        end();
        put(token, shown.slice(fits));
        return;
      }
      line.push([token, shown]);
      used += wide;
      if (line.length > 1 && used > width) wrap();
    };
    tokens.forEach((text, token) => {
      const parts = text.split("\n");
      parts.forEach((part, i) => {
        const last = i === parts.length - 1;
        if (!last) {
          put(token, `${part}\n`);
          end();
        } else if (part || parts.length === 1) put(token, part);
      });
    });
    if (line.length) end();
    return lines;
  }

  /** The text of one run, its colours for one query, and beside it a strip of the whole. */
  class Text {
    /** `at(token, pinned)` is called when a token is pointed at or clicked, `away()` when the pointer leaves. */
    constructor(host, label, { at, away, scrolled }) {
      this.sheet = el("div", { class: "sheet" });
      this.scroll = el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": label }, this.sheet);
      this.map = el("canvas", { class: "map", "aria-hidden": "true" });
      host.append(el("div", { class: "reader" }, this.scroll, this.map));
      this.lines = [];
      this.rows = new Map();
      this.state = null;
      const token = (event) => event.target.closest?.(".token")?.dataset.token;
      this.scroll.addEventListener("pointermove", (event) => {
        const found = token(event);
        if (found !== undefined && event.pointerType !== "touch") at(Number(found), false);
      });
      this.scroll.addEventListener("pointerleave", away);
      this.scroll.addEventListener("click", (event) => {
        if (token(event) !== undefined) at(Number(token(event)), true);
      });
      this.scroll.addEventListener(
        "scroll",
        () => {
          this.fill();
          this.drawMap();
          scrolled?.(this.scroll.scrollTop);
        },
        { passive: true },
      );
      const jump = (event) => {
        if (event.buttons)
          this.show(Math.floor((event.offsetY / this.map.clientHeight) * this.run.tokens.length), "middle");
      };
      this.map.addEventListener("pointerdown", jump);
      this.map.addEventListener("pointermove", jump);
    }

    /** Lay the run's tokens out; again after a change of width or type. */
    lay(run) {
      const top = this.run ? this.lines[Math.floor(this.scroll.scrollTop / this.height)]?.[0]?.[0] : undefined;
      this.run = run;
      const style = getComputedStyle(this.scroll);
      this.height = parseFloat(style.lineHeight);
      const width = this.scroll.clientWidth * 0.985 - 0.3 * lce.rem;
      this.lines = broken(run.tokens, Math.max(60, width), `${style.fontSize} ${style.fontFamily}`);
      this.lineOf = new Uint32Array(run.tokens.length);
      for (let i = this.lines.length - 1; i >= 0; i--) for (const [token] of this.lines[i]) this.lineOf[token] = i;
      this.sheet.style.height = `${this.lines.length * this.height}px`;
      this.sheet.replaceChildren();
      this.rows = new Map();
      if (top !== undefined) this.scroll.scrollTop = this.lineOf[top] * this.height;
      this.fill();
    }

    /** Put the lines on screen into the document, and take the others out. */
    fill() {
      const top = this.scroll.scrollTop,
        extra = 4;
      const first = Math.max(0, Math.floor(top / this.height) - extra);
      const last = Math.min(this.lines.length, Math.ceil((top + this.scroll.clientHeight) / this.height) + extra);
      for (const [i, row] of this.rows)
        if (i < first || i >= last) {
          row.element.remove();
          this.rows.delete(i);
        }
      for (let i = first; i < last; i++) {
        if (this.rows.has(i)) continue;
        const spans = this.lines[i].map(([token, text]) => {
          const span = el("span", {}, lce.shape(text));
          span.dataset.token = token;
          return span;
        });
        const element = el("div", { class: "line" }, ...spans);
        element.style.top = `${i * this.height}px`;
        this.rows.set(i, { element, spans });
        if (this.state) spans.forEach((span) => this.colour(span));
        this.sheet.append(element);
      }
    }

    /** Scroll to a token, if it is not on screen or should stand in the middle. */
    show(token, where = "nearest") {
      const top = this.lineOf[Math.max(0, Math.min(token, this.run.tokens.length - 1))] * this.height;
      const view = this.scroll.clientHeight,
        now = this.scroll.scrollTop;
      if (where === "middle" || top < now || top + this.height > now + view) this.scroll.scrollTop = top - view / 2;
    }

    /** Colour for a query: `state` has `t`, `depth` (of chunks, 0 to 4), `picked` (chunks), `always` (ranges). */
    draw(state) {
      this.state = state;
      for (const { spans } of this.rows.values()) for (const span of spans) this.colour(span);
      this.drawMap();
    }

    colour(span) {
      const { run, state } = this,
        i = Number(span.dataset.token);
      const names = ["token"];
      if (i >= run.prompt) names.push("written");
      if (i === state.t) names.push("query");
      else if (i > state.t) names.push("future");
      else {
        const c = run.chunkOf(i);
        if (c >= 0 && state.depth[c]) names.push(`d${state.depth[c]}`);
        if (c >= 0 && state.picked.has(c)) {
          const [start, stop] = run.range(c);
          names.push("picked");
          if (i === start && (run.size > 1 || !state.picked.has(c - 1))) names.push("first");
          if (i === stop - 1 && (run.size > 1 || !state.picked.has(c + 1))) names.push("last");
        } else if (state.always.some(([start, stop]) => start <= i && i < stop)) names.push("always");
      }
      for (const mark of run.marks) {
        if (mark.start <= i && i < mark.stop) names.push("mark");
        if (mark.start === i) names.push("from");
        if (mark.stop - 1 === i) names.push("to");
      }
      const joined = names.join(" ");
      if (span.className !== joined) span.className = joined;
    }

    drawMap() {
      if (!this.state) return;
      const { run, state } = this,
        width = 1.9 * lce.rem,
        height = this.scroll.clientHeight;
      const g = lce.canvas(this.map, width, height),
        n = run.tokens.length,
        y = (token) => (token / n) * height;
      const bar = (start, stop, least) => g.fillRect(0, y(start), width, Math.max(least, y(stop) - y(start)));
      g.fillStyle = lce.colours.always;
      g.globalAlpha = 0.35;
      for (const [start, stop] of state.always) bar(start, stop, 1);
      g.globalAlpha = 1;
      state.depth.forEach((depth, c) => {
        if (!depth) return;
        g.fillStyle = lce.blue(0.15 + 0.2 * depth);
        bar(...run.range(c), 1.5);
      });
      g.strokeStyle = lce.colours.mark;
      g.lineWidth = 2;
      for (const { start, stop } of run.marks)
        g.strokeRect(1, y(start) - 2, width - 2, Math.max(4, y(stop) - y(start) + 4));
      g.fillStyle = lce.colours.ink;
      g.fillRect(0, Math.min(height - 2, y(state.t)), width, 2);
      g.strokeStyle = lce.colours.muted;
      g.lineWidth = 1;
      const total = this.lines.length * this.height || 1,
        top = this.scroll.scrollTop / total;
      const part = Math.min(1, this.scroll.clientHeight / total);
      g.strokeRect(0.5, top * height + 0.5, width - 1, Math.max(6, part * height - 1));
    }
  }
  lce.Text = Text;
})();
