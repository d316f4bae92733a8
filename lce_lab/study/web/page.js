// The page: which query, which head and which runs are shown, and the controls that change them.
"use strict";
(() => {
  const { el, get } = lce;
  const state = {
    recording: null,
    shown: [],
    t: 0,
    hover: null,
    layer: 0,
    head: 0,
    scope: "all",
    columns: [],
    live: null,
  };

  /** Depth of colour, 0 to 4, by the share of heads that chose a chunk. */
  function depths({ counts, heads }) {
    return Uint8Array.from(counts, (n) =>
      n === 0 ? 0 : 1 + (n >= heads / 8) + (n >= heads / 3) + (n >= (2 * heads) / 3),
    );
  }

  // What is shown ----------------------------------------------------------------------------------------------------

  function build() {
    const { recording } = state,
      two = state.shown.length > 1;
    for (const id of ["text", "heads", "why", "distances", "bytes"]) get(id).replaceChildren();
    get("panels").className = `panels ${two ? "two" : "alone"}`;
    state.columns = state.shown.map((number, i) => {
      const run = recording.runs[number],
        letter = "AB"[i],
        name = `${letter}, ${run.label}`;
      const cell = (id) => {
        const who = el("p", { class: "who" }, el("span", { class: "letter" }, letter), el("b", {}, lce.named(run)));
        return get(id).appendChild(el("div", { class: "cell" }, who));
      };
      const scrolled = (top) => {
        for (const other of state.columns)
          if (other.text && Math.abs(other.text.scroll.scrollTop - top) > 1) other.text.scroll.scrollTop = top;
      };
      const column = { run, gist: el("span", { class: "muted gist" }) };
      column.text = new lce.Text(cell("text"), `Text, ${name}`, { at, away, scrolled });
      column.heads = new lce.Heads(cell("heads"), `Chunks by layer and head, ${name}`, { pick });
      column.why = new lce.Why(cell("why"), { go: (token) => show(token), look: to, toggle: state.live });
      column.distances = new lce.Distances(cell("distances"), `Distances, ${name}`);
      column.bytes = new lce.Bytes(cell("bytes"));
      return column;
    });
    for (const column of state.columns) column.text.lay(column.run);
    [get("slider").min, get("slider").max] = [earliest(), last()];
    answers();
  }

  function earliest() {
    return Math.max(...state.columns.map(({ run }) => run.from));
  }

  function last() {
    return Math.max(...state.columns.map(({ run }) => run.queries)) - 1;
  }

  function answers() {
    const rows = state.columns.map(({ run }, i) => {
      const tokens = run.generated.map((token, g) => {
        const words = lce.wrote(token, g);
        return el(
          "button",
          { type: "button", title: words, "aria-label": words, onclick: () => to(run.prompt - 1 + g) },
          lce.chip(token.text),
        );
      });
      return el(
        "p",
        { class: "answer" },
        el("span", { class: "letter" }, "AB"[i]),
        el("span", { class: "muted" }, tokens.length ? "writes" : "writes nothing"),
        ...tokens,
        state.columns[i].gist,
        run.raw.warning ? el("span", { class: "error" }, run.raw.warning) : null,
      );
    });
    get("answers").replaceChildren(...rows);
  }

  // Drawing ----------------------------------------------------------------------------------------------------------

  let wanted = null;
  /** Draw at the next frame; what is asked for in between is drawn once. */
  function draw(animate = false) {
    if (wanted === null)
      requestAnimationFrame(() => {
        const how = wanted;
        wanted = null;
        drawNow(how.animate);
      });
    wanted = { animate: animate || wanted?.animate };
  }

  function drawNow(animate = false) {
    if (!state.columns.length) return;
    const { layer, head, scope, live } = state,
      token = state.hover ?? state.t;
    const missing = state.columns.filter(({ run }) => !run.isReady(Math.min(token, run.queries - 1), () => draw()));
    if (missing.length) {
      get("now").textContent = `token ${lce.number(token)}: its recording is loaded …`;
      return;
    }
    get("missing").hidden = !state.columns.some(({ run }) => run.segmentOf(Math.min(token, run.queries - 1)).failed);
    for (const { run, gist, text, heads, why, distances, bytes } of state.columns) {
      const t = Math.min(token, run.queries - 1);
      const counts = run.counts(t, scope === "all" ? null : layer, scope === "head" ? head : null);
      text.draw({
        t,
        depth: depths(counts),
        picked: new Set(run.isOff(layer, head) ? [] : run.chosen(t, layer, head)),
        always: run.always(t, layer) ?? [],
      });
      const each = { run, t, layer, head, live: live !== null };
      heads.draw(each);
      why.draw(each);
      distances.draw(each, animate);
      bytes.draw(each);
      gist.textContent = lce.told(run, t);
    }
    tell(token);
  }

  function tell(token) {
    const { run } = state.columns[0],
      t = Math.min(token, run.queries - 1),
      written = run.generated[t - run.prompt + 1];
    const chip = (text) => el("span", { class: "token query" }, lce.chip(text));
    const writes = written && t >= run.prompt - 1 ? [" writes ", chip(written.text)] : [];
    get("now").replaceChildren(chip(run.tokens[t]), ...writes, ` ${lce.place(run, t)}`);
    if (state.hover !== null) return;
    get("slider").value = token;
    get("slider").setAttribute("aria-valuetext", `“${run.tokens[t]}”, ${lce.place(run, t)}`);
    const words = [
      `Query “${run.tokens[t]}”, ${lce.place(run, t)}.`,
      ...state.columns.map((column, i) => lce.summary(column.run, token, state.layer, state.head, "AB"[i])),
    ].join(" ");
    if (get("summary").textContent !== words) get("summary").textContent = words;
  }

  // Moving -----------------------------------------------------------------------------------------------------------

  function at(token, pinned) {
    if (token < earliest()) return;
    if (pinned) {
      to(token, false);
      return;
    }
    if (state.hover === token) return;
    state.hover = token;
    draw();
  }

  function away() {
    if (state.hover === null) return;
    state.hover = null;
    draw();
  }

  function show(token, where) {
    for (const { text } of state.columns) text.show(token, where);
  }

  /** Go to a query and stay there. */
  function to(token, scroll = true) {
    state.t = Math.max(earliest(), Math.min(token, last()));
    state.hover = null;
    if (scroll) show(state.t);
    draw(true);
  }

  /** The next block's last query; with a closer look, if the block has one. */
  function block(way) {
    const { run } = state.columns[0],
      blocks = run.raw.blocks,
      now = run.blockOf(Math.min(state.t, run.queries - 1)) + way;
    if (now < 0 || now >= blocks.length) {
      to(way < 0 ? earliest() : last());
      return;
    }
    const [start, stop] = blocks[now],
      looked = run.looked.filter((q) => start <= q && q < stop).at(-1);
    to(looked ?? stop - 1);
  }

  function look(way) {
    const found = state.columns[0].run.lookNear(state.t, way);
    if (found !== undefined) to(found);
  }

  function pick(layer, head, chunk = null) {
    [state.layer, state.head] = [layer, head];
    get("layer").value = layer;
    get("head").value = head;
    if (chunk !== null && chunk < state.columns[0].run.chunks) show(state.columns[0].run.range(chunk)[0], "middle");
    draw();
  }

  const answer = () => state.columns[0].run.prompt - 1;

  // Controls ---------------------------------------------------------------------------------------------------------

  function fill(select, names, value) {
    select.replaceChildren(...names.map(([key, text]) => el("option", { value: key }, text)));
    select.value = value;
  }

  /** The head with most true attention to the answer where it is written, or else with most to any one chunk. */
  function mostTelling(run) {
    let best = [0, 0],
      most = -1;
    const t = run.prompt - 1;
    for (let layer = 0; layer < run.model.layers; layer++) {
      for (let head = 0; head < run.heads; head++) {
        const found = run.lookAt(t, layer, head),
          marked = (found?.marked ?? []).reduce((sum, [, mass]) => sum + mass, 0);
        const mass = run.marks.length ? marked : Math.max(0, ...(found?.mass ?? []));
        if (mass > most) [best, most] = [[layer, head], mass];
      }
    }
    return best;
  }

  /** Which runs are beside each other, after a change of the choosers. */
  function choose() {
    const a = Number(get("run-a").value),
      b = get("run-b").value;
    state.shown = b === "none" ? [a] : [a, Number(b)];
    build();
    state.t = Math.max(earliest(), Math.min(state.t, last()));
    show(state.t);
    drawNow();
  }

  /** Show a recording: the query that writes the first token of the answer, and the first two runs. With `older` runs
   *  on the same text the query and the head stay as they are. */
  function open(raw, older = []) {
    const recording = new lce.Recording(raw, older),
      { model } = recording,
      [first] = recording.runs,
      stay = older.length > 0;
    state.recording = recording;
    get("shown").hidden = false;
    get("empty").hidden = true;
    get("about").textContent = lce.about(recording);
    const names = recording.runs.map((run, i) => [i, lce.named(run)]);
    fill(get("run-a"), names, 0);
    fill(get("run-b"), [["none", "none"], ...names], recording.runs.length > 1 ? 1 : "none");
    const count = (n) => Array.from({ length: n }, (_, i) => [i, String(i)]);
    fill(get("layer"), count(model.layers), state.layer);
    fill(get("head"), count(model.heads), state.head);
    const tell = () => {
      [state.layer, state.head] = mostTelling(first);
      pick(state.layer, state.head);
    };
    const places = first.marks.map((mark, i) =>
      el(
        "button",
        { type: "button", onclick: () => show(mark.start, "middle") },
        `show “${mark.label}”${first.marks.length > 1 ? ` ${i + 1}` : ""}`,
      ),
    );
    get("marks").replaceChildren(...places);
    if (!stay) state.t = first.prompt - 1;
    if (!stay && first.isReady(state.t, tell)) [state.layer, state.head] = mostTelling(first);
    [get("layer").value, get("head").value] = [state.layer, state.head];
    choose();
    if (first.marks.length) show(first.marks[0].start, "middle");
  }

  function controls() {
    const on = (id, type, then) => get(id).addEventListener(type, then);
    on("run-a", "change", choose);
    on("run-b", "change", choose);
    on("scope", "change", () => {
      state.scope = get("scope").value;
      draw();
    });
    on("layer", "change", () => pick(Number(get("layer").value), state.head));
    on("head", "change", () => pick(state.layer, Number(get("head").value)));
    on("slider", "input", () => to(Number(get("slider").value)));
    on("token-back", "click", () => to(state.t - 1));
    on("token-on", "click", () => to(state.t + 1));
    on("block-back", "click", () => block(-1));
    on("block-on", "click", () => block(1));
    on("to-answer", "click", () => to(answer()));
    document.addEventListener("keydown", key);
    let width = 0;
    new ResizeObserver(() => {
      if (innerWidth === width || !state.columns.length) return;
      width = innerWidth;
      again();
    }).observe(document.body);
  }

  function key(event) {
    const { target } = event,
      typing = target.matches("textarea, select, input:not([type=range]):not([type=checkbox])");
    const held = event.ctrlKey || event.altKey || event.metaKey,
      command = held && !event.getModifierState("AltGraph"); // brackets need AltGr on many keyboards
    if (typing || command || !state.columns.length || !get("shortcuts").checked) return;
    const steps = {
      ArrowLeft: () => (event.shiftKey ? block(-1) : to(state.t - 1)),
      ArrowRight: () => (event.shiftKey ? block(1) : to(state.t + 1)),
      "[": () => look(-1),
      "]": () => look(1),
      a: () => to(answer()),
    };
    if (!steps[event.key]) return;
    event.preventDefault();
    steps[event.key]();
  }

  /** Lay everything out again, after a change of width, type or colours. */
  function again() {
    lce.readColours();
    for (const column of state.columns) column.text.lay(column.run);
    drawNow();
  }

  function start() {
    lce.settings(again);
    controls();
    const live = get("lce-live"),
      raw = JSON.parse(get("lce-recording")?.textContent || "null");
    if (live) {
      const show = (fresh) => {
        open(fresh, lce.Live.older(fresh, state.recording));
        for (const run of state.recording.runs) run.loadAll();
      };
      state.live = new lce.Live(JSON.parse(live.textContent), { show, changed: () => draw() });
    }
    lce.open = open; // for a page that holds this one in a frame
    if (raw) open(raw);
    else if (!live) {
      get("empty").textContent = "This page holds no recording. lce inspect makes one.";
      get("empty").hidden = false;
    }
  }
  start();
})();
