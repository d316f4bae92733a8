// A recording, format 1 (docs/inspect.md): tokens, and for every query of every run the chunks that each head chose.
"use strict";
(() => {
  function bytesOf(base64) {
    if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
    return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  }

  function decoded(base64, bits) {
    const { buffer } = bytesOf(base64);
    return bits === 32 ? new Uint32Array(buffer) : new Uint16Array(buffer);
  }

  /** The JSON value in base64 text that zlib compressed. */
  function unpacked(base64) {
    const stream = new Blob([bytesOf(base64)]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).json();
  }

  const loading = new WeakMap(); // script tags, and the run and segment that each loads

  /** The number of the element of an ordered list that holds `t`, by bisection. */
  function holding(list, t, first) {
    let [low, high] = [0, list.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (first(list[middle]) <= t) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** One method on the prompt: what every query chose, and closer looks at some of them. */
  class Run {
    constructor(recording, raw) {
      this.raw = raw;
      this.model = recording.model;
      this.heads = recording.model.heads;
      this.window = raw.window ?? recording.model.window;
      this.label = raw.label;
      this.prompt = recording.tokens.length;
      this.generated = raw.generated ?? [];
      this.tokens = recording.tokens.concat(this.generated.map((token) => token.text));
      this.marks = recording.marks ?? [];
      this.from = raw.blocks[0][0]; // the first query that was recorded
      this.queries = raw.blocks.at(-1)[1];
      this.size = raw.chunk_size;
      this.first = raw.first;
      this.word = raw.chunk_size === 1 ? "token" : "chunk"; // what is chosen
      this.chunks = Math.max(0, Math.ceil((this.tokens.length - this.first) / this.size));
      this.choosing = raw.choosing;
      this.none = raw.bits === 32 ? 0xffffffff : 0xffff; // behind a head's last choice
      this.offKeys = new Set((raw.off ?? []).map(([layer, head]) => `${layer}.${head}`));
      this.looked = raw.looked ?? [];
      this.segments = raw.segments.map((segment) => ({ ...segment, waiting: [] }));
      for (const segment of this.segments) if (!segment.src) this.take(segment, segment.data, segment.looks);
    }

    chooses(layer) {
      return this.raw.layers[layer].chooses;
    }

    chunkOf(token) {
      return Math.floor((token - this.first) / this.size);
    }

    /** The tokens of a chunk, [start, stop). */
    range(c) {
      const start = this.first + c * this.size;
      return [Math.max(0, start), Math.min(this.tokens.length, start + this.size)];
    }

    /** The text of a chunk on one line; of a single token with its neighbours. */
    words(c, most = 60) {
      if (this.size < 4) {
        const [start, stop] = this.range(c),
          part = (a, b) => this.tokens.slice(Math.max(0, a), b).join("").replace(/\s+/g, " ");
        return lce.shape(`${part(start - 4, start)}[${part(start, stop)}]${part(stop, stop + 6)}`.trim());
      }
      const [start, stop] = this.range(c),
        text = this.tokens.slice(start, stop).join("").replace(/\s+/g, " ").trim();
      return lce.shape(text.length > most ? `${text.slice(0, most - 1)}…` : text);
    }

    isOff(layer, head) {
      return this.offKeys.has(`${layer}.${head}`);
    }

    isMarked(c) {
      const [start, stop] = this.range(c);
      return this.marks.some((mark) => mark.start < stop && start < mark.stop);
    }

    /** The number of the prefill block, or of the decode step, that held query `t`. */
    blockOf(t) {
      return holding(this.raw.blocks, t, (block) => block[0]);
    }

    segmentOf(t) {
      return this.segments[holding(this.segments, t, (segment) => segment.start)];
    }

    /** Whether the record of query `t` is at hand. If not, it is loaded from beside the page, and `then` is called. */
    isReady(t, then) {
      const segment = this.segmentOf(t);
      if (segment.numbers || segment.failed) return true;
      segment.waiting.push(then);
      if (segment.waiting.length === 1) {
        const script = lce.el("script", { src: segment.src, onerror: () => this.fail(segment) });
        loading.set(script, [this, segment]);
        document.head.append(script);
      }
      return false;
    }

    /** Load all that is beside the page, one piece after the other: what serves it may forget it. */
    loadAll() {
      const next = this.segments.find((segment) => !segment.numbers && !segment.failed);
      if (next) this.isReady(next.start, () => setTimeout(() => this.loadAll()));
    }

    take(segment, base64, looks) {
      segment.numbers = decoded(base64, this.raw.bits);
      segment.looks = looks ?? {};
      segment.data = null;
      this.tell(segment);
    }

    fail(segment) {
      segment.failed = true;
      this.tell(segment);
    }

    tell(segment) {
      for (const then of segment.waiting.splice(0)) then();
    }

    /** Which chooser a head follows: heads that choose together share one. */
    chooserOf(head) {
      return Math.floor((head * this.raw.choosers) / this.heads);
    }

    /** The chunks that a head chose for query `t`, ascending. */
    chosen(t, layer, head) {
      const place = this.choosing.indexOf(layer),
        segment = this.segmentOf(t),
        { choosers, k } = this.raw;
      if (place < 0 || !segment.numbers || !k) return [];
      const query = segment.rows === 1 ? 0 : t - segment.start;
      const row = (query * this.choosing.length + place) * choosers + this.chooserOf(head),
        found = [];
      for (let i = row * k; i < (row + 1) * k && segment.numbers[i] !== this.none; i++) found.push(segment.numbers[i]);
      return found;
    }

    /** How many heads chose each chunk: of all heads, of a layer, or one. Heads that are off do not count. */
    counts(t, layer = null, head = null) {
      const counts = new Uint16Array(this.chunks);
      let heads = 0;
      for (const l of layer === null ? this.choosing : [layer]) {
        if (!this.chooses(l)) continue;
        for (let h = 0; h < this.heads; h++) {
          if ((head !== null && h !== head) || this.isOff(l, h)) continue;
          heads += 1;
          for (const c of this.chosen(t, l, h)) counts[c] += 1;
        }
      }
      return { counts, heads };
    }

    look(t) {
      return this.segmentOf(t).looks?.[t];
    }

    /** What a closer look says of one head; undefined where there is none. */
    lookAt(t, layer, head) {
      const look = this.look(t),
        found = look?.layers[layer];
      if (!found) return undefined;
      const chooser = this.chooserOf(head),
        own = found.heads[head];
      return {
        ...own,
        chosen: found.chosen[chooser] ?? [],
        scores: found.scores?.[chooser] ?? [],
        ranks: found.ranks?.[chooser] ?? [],
        mass: own.mass ?? [],
        distances: own.distances == null ? null : look.distances[own.distances],
        always: found.always == null ? null : look.always[found.always],
      };
    }

    /** The query with a closer look before (`way` -1) or after `t`. */
    lookNear(t, way) {
      return way < 0 ? this.looked.filter((q) => q < t).at(-1) : this.looked.find((q) => q > t);
    }

    /** The ranges that query `t` attends in a layer whatever it chooses, as [start, stop]; null if not known. */
    always(t, layer) {
      const entry = (this.raw.always ?? []).find((each) => each.layers.includes(layer));
      if (!entry) return null;
      const [q0, q1, spans] = entry.runs[holding(entry.runs, t, (run) => run[0])] ?? [0, 0, []];
      if (t < q0 || t >= q1) return [];
      const step = t - q0;
      return spans.map(([a, da, b, db]) => [a + da * step, b + db * step]).filter(([a, b]) => a < b);
    }

    /** How much of what query `t` could see of a chunk it attends anyway: "always", "partly", or "". */
    alwaysOf(t, layer, c) {
      const [start, end] = this.range(c),
        stop = Math.min(end, t + 1);
      const tokens = (this.always(t, layer) ?? []).reduce(
        (sum, [a, b]) => sum + Math.max(0, Math.min(b, stop) - Math.max(a, start)),
        0,
      );
      return tokens >= stop - start ? "always" : tokens ? "partly" : "";
    }
  }

  class Recording {
    /** `older` are runs of a recording before, on the same text, that are shown too. */
    constructor(raw, older = []) {
      if (raw.format !== 1)
        throw new Error(`This page reads recordings of format 1; this one is of format ${raw.format}.`);
      this.raw = raw;
      this.model = raw.model;
      this.tokens = raw.tokens;
      this.judge = raw.judge;
      this.runs = [...raw.runs.map((run) => new Run(raw, run)), ...older];
    }
  }

  /** Data that lies beside the page is scripts that call this. A script's tag says which segment it was loaded for. */
  window.lceSegment = async (_run, _segment, packed) => {
    const [run, segment] = loading.get(document.currentScript) ?? [];
    if (!run) return;
    const found = await unpacked(packed).catch(() => null);
    if (found) run.take(segment, found.data, found.looks);
    else run.fail(segment);
  };
  lce.Recording = Recording;
})();
