// One head's scores and ranks beside its true attention, and in words why it misses what it misses.
"use strict";
(() => {
  const { el } = lce;
  const MOST = 8; // rows
  const MOST_MARKS = 3; // marked places with a sentence each

  const CAUSES = {
    selection: (look) => [
      "A miss of selection.",
      `Another choice of as many chunks would attend ${lce.share(look.reachable)} of the true attention.`,
    ],
    budget: (look) => [
      "A miss of budget.",
      `Even the best choice of as many chunks would attend only ${lce.share(look.reachable)} of the true attention.`,
    ],
    placement: () => [
      "A miss of placement.",
      "What matters is attended, but the distances at which it is seen change how much weight it gets.",
    ],
  };

  /** What became of the marked answer in a head, in words. */
  function ofMarks(run, look) {
    const found = (look.marked ?? []).filter(([, mass]) => mass >= 0.005).sort((a, b) => b[1] - a[1]),
      rest = found.slice(MOST_MARKS);
    const sentences = found.slice(0, MOST_MARKS).map(([number, mass, rank, attended]) => {
      const placed = rank >= 0 ? `, rank ${lce.number(rank + 1)} by score` : "";
      const read = attended >= 1 ? "attended" : attended > 0 ? "attended in part" : "not attended";
      const answer = `The answer “${run.marks[number].label}”`;
      return ` ${answer} has ${lce.share(mass)} of the true attention${placed}: ${read}.`;
    });
    if (rest.length) {
      const sum = rest.reduce((total, [, mass]) => total + mass, 0);
      sentences.push(` ${lce.some(rest.length, "more place")} of it: ${lce.share(sum)} together.`);
    }
    return sentences.join("");
  }

  /** The verdict on a head as [kind, strong words, more words]. */
  lce.verdict = (run, t, layer, head) => {
    if (run.isOff(layer, head)) return ["miss", "Switched off.", "In this run the output of this head is zero."];
    const look = run.lookAt(t, layer, head);
    if (!look) return ["", "For this query the choices alone are recorded.", ""];
    const held = [
      `It attends ${lce.share(look.recall)} of its true attention,`,
      `${lce.share(look.always_mass)} in tokens that are always attended.${ofMarks(run, look)}`,
    ].join(" ");
    if (look.why) {
      const [strong, words] = CAUSES[look.why](look),
        [most] = lce.missed(run, t, layer, head, 0.005);
      const rank = most?.[2] >= 0 ? ` and rank ${lce.number(most[2] + 1)} by score` : "";
      const named = most
        ? ` Missed most: ${run.word} ${most[0]}, with ${lce.share(most[1])} of the true attention${rank}.`
        : "";
      return ["miss", strong, `${words}${named} ${held}`];
    }
    return ["good", run.chooses(layer) ? "Nothing that matters is missed." : "This layer does not choose.", held];
  };

  /** The chunks of a look by true attention: { chunk, mass, given, score, rank, state }. */
  function rows(run, t, layer, head) {
    const look = run.lookAt(t, layer, head),
      found = new Map();
    look.chosen.forEach((chunk, i) => {
      found.set(chunk, {
        chunk,
        mass: look.mass[i],
        given: look.given?.[i],
        score: look.scores[i],
        rank: look.ranks[i],
        state: "chosen",
      });
    });
    for (const [chunk, mass, rank, chosen] of look.best) {
      if (found.has(chunk)) continue;
      const state = chosen ? "chosen" : run.alwaysOf(t, layer, chunk) || "missed";
      found.set(chunk, { chunk, mass, rank, state });
    }
    const last = (row) => (row.rank == null || row.rank < 0 ? Infinity : row.rank);
    return [...found.values()].sort((a, b) => (b.mass ?? 0) - (a.mass ?? 0) || last(a) - last(b));
  }

  class Why {
    /** `go(token)` shows a place of the text, `look(t)` goes to a query, `toggle` switches a head. */
    constructor(host, { go, look, toggle }) {
      this.host = el("div", {});
      Object.assign(this, { go, look, toggle });
      host.append(this.host);
    }

    draw({ run, t, layer, head, live }) {
      const [kind, strong, words] = lce.verdict(run, t, layer, head),
        look = run.lookAt(t, layer, head);
      const parts = [
        el("p", { class: `verdict ${kind}` }, el("b", {}, `Layer ${layer}, head ${head}. ${strong}`), " ", words),
      ];
      if (live) {
        const all = Array.from({ length: run.heads }, (_, each) => each);
        const button = (heads, what) => {
          const off = this.toggle.is(layer, heads);
          const onclick = () => this.toggle.flip(layer, heads);
          return el("button", { type: "button", "aria-pressed": String(off), onclick }, `Switch ${what} off`);
        };
        parts.push(
          el("p", { class: "row verdict" }, button([head], "this head"), button(all, "all heads of this layer")),
        );
      }
      if (!look) parts.push(this.elsewhere(run, t));
      else if (!run.isOff(layer, head)) parts.push(this.table(run, t, layer, head));
      this.host.replaceChildren(...parts);
    }

    /** Where the nearest closer looks are. */
    elsewhere(run, t) {
      const jump = (to) =>
        to === undefined
          ? null
          : el("button", { type: "button", onclick: () => this.look(to) }, `query ${lce.number(to)}`);
      const [before, after] = [jump(run.lookNear(t, -1)), jump(run.lookNear(t, 1))];
      return el("p", { class: "row muted" }, "Scores and true attention are recorded for some queries:", before, after);
    }

    table(run, t, layer, head) {
      const all = rows(run, t, layer, head),
        shown = all.slice(0, MOST),
        rest = all.slice(MOST);
      const given = shown.some((row) => row.given != null),
        top = Math.max(...shown.map((row) => row.mass ?? 0), 1e-9);
      const bar = (mass) => {
        const drawn = el("span", { class: "bar" });
        drawn.style.setProperty("--share", Math.max(0, (mass ?? 0) / top));
        drawn.hidden = !mass;
        return drawn;
      };
      const words = ({ chunk }) =>
        el(
          "button",
          { type: "button", class: "plain", onclick: () => this.go(run.range(chunk)[0]) },
          run.words(chunk),
        );
      const score = (x) => (x != null && isFinite(x) ? lce.number(Number(x.toPrecision(4))) : "–");
      const columns = [
        [run.size === 1 ? "Token" : "Chunk", "c0", (row) => [String(row.chunk)]],
        ["Text", "c1 words", (row) => [words(row)]],
        ["True attention", "c2", (row) => [bar(row.mass), ` ${lce.share(row.mass)}`]],
        given && ["Given", "c6 number", (row) => [lce.share(row.given)]],
        ["Score", "c3 number wide-only", (row) => [score(row.score)]],
        ["Rank", "c4 number", ({ rank }) => [rank == null || rank < 0 ? "–" : lce.number(rank + 1)]],
        ["", "c5 state", (row) => [row.state]],
      ].filter(Boolean);
      const body = shown.map((row) =>
        el(
          "tr",
          { class: `${row.state}${run.isMarked(row.chunk) ? " holds" : ""}` },
          ...columns.map(([, kind, cell]) => el("td", { class: kind }, ...cell(row))),
        ),
      );
      const sum = rest.reduce((total, row) => total + (row.mass ?? 0), 0);
      const table = el(
        "table",
        {},
        el("caption", { class: "hidden" }, `Layer ${layer}, head ${head}: ${run.word}s by true attention`),
        el(
          "thead",
          {},
          el("tr", {}, ...columns.map(([name, kind]) => el("th", { scope: "col", class: kind }, name))),
        ),
        el("tbody", {}, ...body),
      );
      const note = rest.length
        ? `and ${lce.some(rest.length, `more ${run.word}`)} with ${lce.share(sum)} of the true attention together`
        : "";
      return el("div", { class: "over" }, table, el("p", { class: "note" }, note));
    }
  }
  lce.Why = Why;
})();
