// Live mode: asks the engine behind the page, which runs one prompt at a time, and shows what comes.
"use strict";
(() => {
  const { el, get } = lce;
  const EVERY = 300; // ms between questions about progress
  const MOST_OLDER = 5; // runs of before that are kept

  class Live {
    /** `show(raw)` shows a recording, `changed()` is called when a head is switched. */
    constructor({ base, prompt }, { show, changed }) {
      Object.assign(this, { base, show, changed });
      get("ask-text").value = prompt ?? "";
      get("missing").textContent = "Data of this query is no longer there; run the prompt again.";
      this.off = new Set();
      this.known = null;
      get("live").hidden = false;
      get("footer").textContent = "Served by lce inspect --live, which listens on this machine alone.";
      get("ask").addEventListener("submit", (event) => {
        event.preventDefault();
        this.run();
      });
      get("ask-cancel").addEventListener("click", () => this.ask("cancel", {}).catch((error) => this.fail(error)));
      get("ask-method").addEventListener("change", () => this.showKnobs());
      this.ask("about")
        .then((about) => this.begin(about))
        .catch((error) => this.fail(error));
    }

    /** A question to the engine: GET, or POST with a body. Raises an error in words. */
    async ask(path, body) {
      let answer, said;
      try {
        const post = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
        answer = await fetch(this.base + path, body === undefined ? {} : post);
        said = await answer.json();
      } catch {
        throw new Error("The engine does not answer. Is lce inspect --live still running?");
      }
      if (!answer.ok) throw new Error(said.error ?? `The engine refused, with status ${answer.status}.`);
      return said;
    }

    begin(about) {
      this.methods = about.methods;
      this.heads = about.model.heads;
      get("ask-method").replaceChildren(
        ...about.methods.map((method) => el("option", { value: method.name }, method.name)),
      );
      if (about.methods.some((method) => method.name === "longheads")) get("ask-method").value = "longheads";
      get("ask-tokens").max = about.max_tokens;
      this.showKnobs();
      this.poll();
    }

    showKnobs() {
      const method = this.methods.find((each) => each.name === get("ask-method").value);
      const fields = method.knobs.map((knob) => {
        const standard = knob.default == null ? "default" : `default: ${knob.default}`;
        const options = (values) => values.map((value) => el("option", { value }, String(value)));
        const words = knob.words.length ? el("datalist", { id: `words-${knob.name}` }, ...options(knob.words)) : null;
        const input = knob.choices
          ? el(
              "select",
              {},
              el("option", { value: "" }, standard),
              ...options(knob.choices),
            )
          : el("input", {
              type: "text",
              placeholder: [standard, ...knob.words].join(", or "),
              list: words?.id,
              spellcheck: "false",
              autocomplete: "off",
            });
        input.dataset.knob = knob.name;
        return el("label", { class: "field", title: knob.help }, knob.name, input, words);
      });
      const none = el("span", { class: "muted" }, "This method has none.");
      get("ask-knobs").replaceChildren(el("legend", {}, "Knobs"), ...(fields.length ? fields : [none]));
      get("ask-knobs").title = method.about ?? "";
    }

    /** The knobs that were filled in, as text; the engine reads numbers and words from it. */
    knobs() {
      const found = {};
      for (const input of get("ask-knobs").querySelectorAll("[data-knob]")) {
        const text = input.value.trim();
        if (text) found[input.dataset.knob] = text;
      }
      return found;
    }

    async run() {
      const text = get("ask-text").value,
        question = get("ask-question").value,
        mark = get("ask-mark").value;
      const prompt = text + (text && question && !/\s$/.test(text) && !/^\s/.test(question) ? " " : "") + question;
      get("ask-error").hidden = true;
      if (!prompt) {
        this.fail(new Error("There is nothing to read yet: write a text or a question."));
        return;
      }
      const off = [...this.off].map((key) => key.split(".").map(Number));
      try {
        this.busy(true);
        const max_tokens = Number(get("ask-tokens").value);
        await this.ask("run", {
          prompt,
          method: get("ask-method").value,
          knobs: this.knobs(),
          max_tokens,
          off,
          marks: mark ? [mark] : [],
        });
        this.poll();
      } catch (error) {
        this.busy(false);
        this.fail(error);
      }
    }

    async poll() {
      clearTimeout(this.timer);
      let said;
      try {
        said = await this.ask(`state${this.known === null ? "" : `?known=${this.known}`}`);
      } catch (error) {
        this.busy(false);
        this.fail(error);
        return;
      }
      const running = said.state === "running";
      this.busy(running);
      const progress = get("ask-progress");
      progress.hidden = !running;
      if (said.total) [progress.max, progress.value] = [said.total, said.done];
      else progress.removeAttribute("value");
      const words = {
        running: [
          said.stage ?? "running",
          said.total ? `${lce.number(said.done)} of ${lce.number(said.total)}` : "",
        ].join(" "),
        cancelled: "cancelled",
        done: "done",
      };
      get("ask-state").textContent = words[said.state] ?? "";
      if (said.state === "failed") this.fail(new Error(said.error ?? "The run failed."));
      if (said.recording && said.id !== this.known) {
        this.known = said.id;
        this.show(said.recording);
      }
      if (running) this.timer = setTimeout(() => this.poll(), EVERY);
    }

    busy(is) {
      get("ask-run").disabled = is;
      get("ask-cancel").disabled = !is;
    }

    fail(error) {
      get("ask-error").textContent = error.message;
      get("ask-error").hidden = false;
      get("ask-state").textContent = "";
    }

    /** Whether heads of a layer are off in the next run: all of them. */
    is(layer, heads) {
      return heads.every((head) => this.off.has(`${layer}.${head}`));
    }

    /** Switch heads of a layer off in the next run; on again, if all of them are off. */
    flip(layer, heads) {
      const on = this.is(layer, heads);
      for (const head of heads) {
        if (on) this.off.delete(`${layer}.${head}`);
        else this.off.add(`${layer}.${head}`);
      }
      this.showOff();
      this.changed();
    }

    /** The heads that are off in the next run, those of a layer in one button. */
    showOff() {
      const layers = new Map();
      for (const key of this.off) {
        const [layer, head] = key.split(".").map(Number);
        layers.set(
          layer,
          [...(layers.get(layer) ?? []), head].sort((a, b) => a - b),
        );
      }
      const buttons = [...layers].map(([layer, heads]) => {
        const some = `${heads.length === 1 ? "head" : "heads"} ${lce.list(heads.map(String))}`;
        const words = `layer ${layer}, ${heads.length === this.heads ? "all heads" : some}`;
        const onclick = () => this.flip(layer, heads);
        return el("button", { type: "button", "aria-label": `Switch on again: ${words}`, onclick }, `${words} ×`);
      });
      get("ask-off").hidden = !buttons.length;
      get("ask-off").replaceChildren(el("span", { class: "muted" }, "Off in the next run:"), ...buttons);
    }

    /** The runs of the recording before that can be shown beside a new one: those on the same text. */
    static older(raw, before) {
      const same =
        before &&
        raw.tokens.length === before.tokens.length &&
        raw.tokens.every((text, i) => text === before.tokens[i]);
      if (!same) return [];
      for (const run of before.runs) if (!run.label.endsWith(", before")) run.label += ", before";
      return before.runs.slice(0, MOST_OLDER);
    }
  }
  lce.Live = Live;
})();
