// Bytes that a query reads, beside those of full attention, and the share of the true attention that they hold.
"use strict";
(() => {
  const { el } = lce;

  /** The mean recall over the heads that are on, of a query with a closer look; null without one. */
  lce.recall = (run, t) => {
    const look = run.look(t);
    if (!look) return null;
    const all = look.layers.flatMap((layer, l) =>
      layer.heads.filter((_, h) => !run.isOff(l, h)).map((head) => head.recall),
    );
    const known = all.filter((x) => x != null);
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  };

  class Bytes {
    constructor(host) {
      host.append((this.host = el("div", {})));
    }

    draw({ run, t }) {
      const look = run.look(t);
      if (!look) {
        this.host.replaceChildren(
          el("p", { class: "muted" }, "Bytes are recorded for the queries with a closer look."),
        );
        return;
      }
      const { read, scored, full } = look.bytes,
        all = read + scored;
      const figure = (value, words) => el("p", { class: "figure" }, el("b", {}, value), el("span", {}, words));
      const part = (kind, value) => {
        const bar = el("i", { class: kind });
        bar.style.width = `${Math.min(100, (100 * value) / Math.max(full, all, 1))}%`;
        return bar;
      };
      const figures = el(
        "div",
        { class: "figures" },
        figure(full ? lce.share(all / full) : "–", "of full attention’s bytes"),
        figure(lce.share(lce.recall(run, t)), "of the true attention: recall"),
      );
      const meter = el(
        "div",
        { class: "meter" },
        el("span", {}, "this query"),
        el("span", { class: "track" }, part("read", read), part("scores", scored)),
        el("span", {}, "full attention"),
        el("span", { class: "track" }, part("full", full)),
      );
      const chosenBy = scored ? `, ${lce.size(scored)} to choose by` : "";
      const words = `${lce.size(read)} of keys and values${chosenBy}; full attention reads ${lce.size(full)}.`;
      this.host.replaceChildren(figures, meter, el("p", { class: "note" }, words));
    }
  }
  lce.Bytes = Bytes;
})();
