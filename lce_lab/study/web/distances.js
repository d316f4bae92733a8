// Where the attended keys stand in the text, and at which distances the query sees them.
"use strict";
(() => {
  const { el } = lce;
  const INSIDE = 0.72; // the share of the strip that is within the window, where something is seen beyond it
  const MOVE = 320; // ms

  class Distances {
    constructor(host, label) {
      this.canvas = el("canvas", { class: "chart", role: "img" });
      this.note = el("p", { class: "note", "aria-hidden": "true" });
      this.box = el("div", {}, this.canvas);
      this.label = label;
      host.append(this.box, this.note);
      this.places = new Map(); // of what is drawn, by its name: [left above, right above, left below, right below]
    }

    /** What the picked head sees: { name, kind, start, stop, near, far } each. */
    seen() {
      const { run, t, layer, head } = this.state,
        look = run.lookAt(t, layer, head),
        found = [];
      for (const [i, [start, stop, near, far]] of (look?.always ?? []).entries()) {
        if (near != null && stop > start) found.push({ name: `always ${i}`, kind: "always", start, stop, near, far });
      }
      (look?.distances ?? []).forEach(([near, far], i) => {
        const c = look.chosen[i];
        if (c === undefined || near == null) return;
        const [start, stop] = run.range(c);
        found.push({
          name: `chunk ${c}`,
          kind: run.isMarked(c) ? "mark" : "chosen",
          start,
          stop: Math.min(stop, t + 1),
          near,
          far,
        });
      });
      return found;
    }

    draw(state, animate = false) {
      this.state = state;
      const { run, t, layer, head } = state,
        seen = this.seen();
      this.width = Math.max(180, this.box.clientWidth);
      const farthest = Math.max(0, ...seen.map((each) => each.far));
      this.beyond = farthest >= run.window;
      this.end = Math.max(t + 1, run.window);
      const inset = 2,
        wide = this.width - 2 * inset,
        scale = this.beyond ? INSIDE : 0.94;
      const below = (distance) => {
        if (distance <= run.window) return inset + wide * (1 - (distance / run.window) * scale);
        const rest = Math.log(distance / run.window) / Math.log(Math.max(2, this.end / run.window));
        return inset + wide * (1 - scale) * (1 - Math.min(1, rest));
      };
      const above = (token) => inset + (token / (t + 1)) * wide;
      this.below = below;
      const goal = new Map(
        seen.map((each) => [each.name, [above(each.start), above(each.stop), below(each.far + 1), below(each.near)]]),
      );
      cancelAnimationFrame(this.frame);
      const from = this.places;
      if (!animate || lce.still() || !from.size) {
        this.places = goal;
        this.paint(seen);
      } else {
        const began = performance.now();
        const step = (now) => {
          const part = Math.min(1, Math.max(0, (now - began) / MOVE)),
            eased = 1 - (1 - part) ** 3;
          this.places = new Map(
            [...goal].map(([name, to]) => [
              name,
              to.map((x, i) => (from.has(name) ? from.get(name)[i] + (x - from.get(name)[i]) * eased : x)),
            ]),
          );
          this.paint(seen);
          if (part < 1) this.frame = requestAnimationFrame(step);
        };
        step(began);
      }
      this.describe(seen, farthest, run, t, layer, head);
    }

    paint(seen) {
      const c = lce.colours,
        rem = lce.rem,
        { run, t } = this.state;
      const text = 1.3 * rem,
        high = 1.05 * rem,
        strip = text + 5.2 * rem,
        height = strip + high + 1.6 * rem;
      const g = lce.canvas(this.canvas, this.width, height);
      g.fillStyle = c.soft;
      g.fillRect(2, text, this.width - 4, high);
      g.fillRect(2, strip, this.width - 4, high);
      const window_ = this.below(run.window);
      if (this.beyond) {
        g.fillStyle = c.miss;
        g.globalAlpha = 0.16;
        g.fillRect(2, strip - 0.3 * rem, window_ - 2, high + 0.6 * rem);
        g.globalAlpha = 1;
      }
      g.fillStyle = c.muted;
      g.textAlign = "left";
      g.fillText("in the text: token 0", 2, text - 0.65 * rem);
      g.textAlign = "right";
      g.fillText(`query, token ${lce.number(t)}`, this.width - 2, text - 0.65 * rem);
      const colour = { always: c.always, chosen: c.chosen, mark: c.chosen };
      for (const each of seen) {
        const [a, b, p, q] = this.places.get(each.name);
        g.fillStyle = colour[each.kind];
        g.globalAlpha = 0.22;
        g.beginPath();
        g.moveTo(a, text + high);
        g.lineTo(Math.max(b, a + 1), text + high);
        g.lineTo(Math.max(q, p + 1), strip);
        g.lineTo(p, strip);
        g.fill();
        g.globalAlpha = 1;
        g.fillRect(a, text, Math.max(1.5, b - a), high);
        g.fillRect(p, strip, Math.max(1.5, q - p - 0.75), high);
        if (each.kind !== "mark") continue;
        g.strokeStyle = c.mark;
        g.lineWidth = 2;
        g.strokeRect(a - 1, text - 1, Math.max(4, b - a + 2), high + 2);
        g.strokeRect(p - 1, strip - 1, Math.max(4, q - p + 1), high + 2);
      }
      g.strokeStyle = c.ink;
      g.lineWidth = 2;
      g.beginPath();
      g.moveTo(window_, strip - 0.5 * rem);
      g.lineTo(window_, strip + high + 0.35 * rem);
      g.stroke();
      g.fillStyle = c.muted;
      const y = strip + high + 0.85 * rem;
      g.textAlign = "right";
      g.fillText("distance 0", this.width - 2, y);
      g.textAlign = window_ < 7 * rem ? "left" : "center";
      g.fillStyle = c.ink;
      g.fillText(`window, ${lce.number(run.window)}`, Math.max(2, window_), y);
      if (this.beyond) {
        g.textAlign = "left";
        g.fillStyle = c.miss;
        g.fillText("beyond it", 2, y);
      }
      g.textAlign = "left";
    }

    describe(seen, farthest, run, t, layer, head) {
      const chosen = seen.filter((each) => each.kind !== "always");
      let words;
      if (!run.look(t)) words = "Distances are recorded for the queries with a closer look.";
      else if (!seen.length) words = "The method does not say at which distances it shows keys.";
      else {
        const real = t - Math.min(...seen.map((each) => each.start));
        words =
          `Layer ${layer}, head ${head}: ` +
          (chosen.length ? `${lce.some(chosen.length, `chosen ${run.word}`)}, ` : "") +
          `keys up to ${lce.number(real)} tokens back are seen at distances up to ${lce.number(farthest)}, ` +
          (this.beyond
            ? `beyond the window of ${lce.number(run.window)}.`
            : `within the window of ${lce.number(run.window)}.`);
      }
      this.note.textContent = words;
      this.canvas.setAttribute("aria-label", `${this.label}. ${words}`);
    }
  }
  lce.Distances = Distances;
})();
