// The page of the server: a conversation about a document, and what the answers attended. All text becomes text nodes.
"use strict";
(() => {
  const { el, get, number } = lce;
  const MOST_FILE = 32 << 20; // bytes
  const MOST_WATCHED = 32; // tokens of an answer; POST /inspect takes up to 64
  const LOADING_MS = 1000; // between questions whether the model is loaded
  let props = null; // what the server says of itself
  let file = null; // the document's { name, text }, if it is a file
  let turns = []; // { question, answer, body: what the server was asked }
  let running = null; // the AbortController of the request that runs

  // The server -------------------------------------------------------------------------------------------------------

  /** The server's answer to GET, or to POST with a body. Raises an error in the server's words. */
  async function ask(path, body, signal) {
    const headers = { "Content-Type": "application/json" },
      key = sessionStorage.getItem("lce.key");
    if (key) headers.Authorization = `Bearer ${key}`;
    let answer;
    try {
      answer = await fetch(path, body ? { method: "POST", headers, body: JSON.stringify(body), signal } : { headers });
    } catch (error) {
      throw signal?.aborted ? error : new Error("The server does not answer. Is lce serve still running?");
    }
    if (answer.ok) return answer;
    if (answer.status === 401) askForKey();
    const said = await answer.json().catch(() => null);
    const words = said?.error?.message ?? `The server refused, with status ${answer.status}.`;
    throw Object.assign(new Error(words), { status: answer.status });
  }

  /** The lines of a stream of events, as they come. */
  async function* lines(answer) {
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ; ) {
      const { value, done } = await reader.read();
      if (done) return;
      const found = (rest + value).split("\n");
      rest = found.pop();
      yield* found;
    }
  }

  /** An answer as it comes: { done, total } while the prompt is read, then { thought }, { text }, { reason }, { usage }. */
  async function* pieces(answer) {
    for await (const line of lines(answer)) {
      const [, done, total] = line.match(/^: prefill (\d+)\/(\d+)/) ?? [];
      if (total) yield { done: Number(done), total: Number(total) };
      if (line === "data: [DONE]") return;
      if (!line.startsWith("data: ")) continue;
      const said = JSON.parse(line.slice(6));
      if (said.error) throw new Error(said.error.message);
      const [choice] = said.choices;
      const text = choice?.delta?.content || choice?.text,
        thought = choice?.delta?.reasoning_content;
      yield { text, thought, reason: choice?.finish_reason, usage: said.usage, seed: choice?.seed };
    }
    throw new Error("The answer broke off.");
  }

  function askForKey() {
    sessionStorage.removeItem("lce.key");
    get("main").hidden = true;
    get("key").hidden = false;
    get("key-text").focus();
  }

  /** Ask what is served, until the model is loaded, and show the page. */
  async function begin() {
    get("about").textContent = "";
    try {
      props = await (await ask("props")).json();
      await listContexts();
    } catch (error) {
      get("about").textContent = error.message;
      if (error.status === 503) setTimeout(begin, LOADING_MS);
      return;
    }
    document.title = `${props.model_alias} · lce`;
    const reads = props.n_ctx === null ? "texts of any length" : `up to ${number(props.n_ctx)} tokens`;
    get("about").textContent = `${props.model_alias} · reads ${reads}`;
    const options = props.methods.map((name) => el("option", { value: name }, name));
    get("method").replaceChildren(el("option", { value: "" }, "the default"), ...options);
    [get("key").hidden, get("main").hidden] = [true, false];
  }

  async function listContexts() {
    const { data } = await (await ask("contexts")).json(),
      words = ({ name, n_tokens }) => `${name}, ${lce.some(n_tokens, "token")}`,
      options = data.map((each) => el("option", { value: each.name }, words(each)));
    get("context").replaceChildren(el("option", { value: "" }, "none"), ...options);
    get("context").disabled = !data.length;
  }

  // The document -----------------------------------------------------------------------------------------------------

  async function takeFile() {
    const [given] = get("file").files;
    file = null;
    fail(null);
    try {
      if (given?.size > MOST_FILE) throw new Error(`${given.name} has more than ${lce.size(MOST_FILE)}.`);
      const text = await given?.text();
      if (/[\0\ufffd]/.test(text ?? "")) throw new Error(`${given.name} is not a text file in UTF-8.`);
      if (given) file = { name: given.name, text };
    } catch (error) {
      get("file").value = "";
      fail(error);
    }
    changed();
  }

  /** The text that precedes the first question. A context of the server takes its place. */
  const documentText = () => (get("context").value ? "" : (file?.text ?? get("text").value));

  /** Another document begins another conversation. */
  function changed() {
    const context = get("context").value,
      text = documentText();
    get("method").disabled = Boolean(context); // it has a method of its own
    const what = context ? `the context ${context}` : file ? file.name : "the text";
    const size = context ? "" : `, ${number(text.length)} characters: read with the first question, and kept`;
    get("document").textContent = context || text ? `The conversation is about ${what}${size}.` : "";
    forget();
  }

  function forget() {
    running?.abort();
    turns = [];
    get("talk").replaceChildren();
    get("watch").hidden = true;
  }

  // Asking -----------------------------------------------------------------------------------------------------------

  /** The fields of a request for the next answer. A model without a chat template continues the text. */
  function request(question) {
    const document = documentText(),
      text = (turn, i) => (i || !document ? turn.question : `${document}\n\n${turn.question}`),
      temperature = get("temperature").value,
      body = { max_tokens: Number(get("tokens").value) };
    if (temperature) body.temperature = Number(temperature); // else as the model's makers recommend
    const asked = [...turns, { question }];
    if (props.chat_template)
      body.messages = asked.flatMap((turn, i) => [
        { role: "user", content: text(turn, i) },
        ...(turn.answer === undefined
          ? []
          : [{ role: "assistant", content: turn.answer, reasoning_content: turn.thought }]),
      ]);
    else body.prompt = asked.map((turn, i) => text(turn, i) + (turn.answer ?? "")).join("\n");
    if (get("context").value) body.context = get("context").value;
    else if (get("method").value) body.method = get("method").value;
    return body;
  }

  /** Run `work` with a signal that Stop aborts; errors are shown. */
  async function run(state, work) {
    const own = (running = new AbortController());
    fail(null);
    busy(true, state);
    try {
      await work(own.signal);
    } catch (error) {
      if (!own.signal.aborted) fail(error);
    } finally {
      if (running === own) running = null;
      if (!running) busy(false, "");
    }
  }

  async function send() {
    const question = get("question").value;
    if (running || !question.trim()) return;
    const turn = { question, body: request(question), tokens: 0 },
      shown = show(turn);
    get("question").value = "";
    await run("sending …", async (signal) => {
      try {
        await answer(turn, shown, signal);
      } catch (error) {
        if (!turn.answer) {
          shown.article.remove(); // nothing was answered: the question can be sent again
          get("question").value = question;
        }
        throw error;
      } finally {
        shown.said.ariaBusy = "false";
        if (shown.article.isConnected) settle(turn, shown, signal.aborted);
      }
    });
    get("question").focus();
    showForm();
  }

  async function answer(turn, shown, signal) {
    const path = props.chat_template ? "v1/chat/completions" : "v1/completions",
      more = { stream: true, stream_options: { include_usage: true } };
    turn.sent = performance.now();
    const stream = await ask(path, { ...turn.body, ...more }, signal);
    busy(true, "reading …");
    for await (const { done, total, text, thought, reason, usage, seed } of pieces(stream)) {
      if (total && !turn.answer) progress(done, total);
      turn.reason = reason || turn.reason;
      turn.usage = usage || turn.usage;
      if (seed !== undefined) turn.body.seed = seed; // Watch draws the same tokens again
      if (!text && !thought) continue;
      turn.last = performance.now();
      turn.first ??= turn.last;
      turn.answer = (turn.answer ?? "") + (text ?? "");
      if (thought) turn.thought = (turn.thought ?? "") + thought;
      turn.tokens += 1;
      if (turn.tokens === 1) busy(true, "answering …");
      const { talk } = shown,
        follows = talk.scrollTop + talk.clientHeight > talk.scrollHeight - 40,
        below = isBelow();
      shown.thought.hidden = !turn.thought;
      if (thought) shown.thought.append(thought);
      shown.node.appendData(text ?? "");
      if (follows) talk.scrollTop = talk.scrollHeight;
      if (!below) showForm();
    }
  }

  /** Whether the form below the conversation ends below the window. */
  const isBelow = () => get("ask").getBoundingClientRect().bottom > innerHeight + 40; // a line more is none
  const showForm = () => get("ask").scrollIntoView({ block: "nearest" });

  /** Put a turn into the conversation. */
  function show({ question }) {
    const node = document.createTextNode(""),
      said = el("p", { class: "said answer", "aria-busy": "true" }, node),
      thought = el("p", { class: "muted said", hidden: true }),
      figures = el("p", { class: "muted figures" }),
      who = (name) => el("p", { class: "who" }, name);
    const asked = el("p", { class: "said question" }, question);
    const article = el("article", {}, who("You"), asked, who(props.model_alias), thought, said, figures),
      talk = get("talk");
    talk.append(article);
    talk.scrollTop = talk.scrollHeight;
    showForm();
    return { node, thought, said, figures, article, talk };
  }

  /** Keep a turn that ended, and show its figures. */
  function settle(turn, { figures }, stopped) {
    turn.answer ??= ""; // a model may have nothing to say
    turns.push(turn);
    const { usage, first, last, sent } = turn,
      n = usage?.completion_tokens ?? turn.tokens,
      words = [lce.some(n, "token")];
    if (n > 1 && last > first) words.push(`${((1000 * (n - 1)) / (last - first)).toFixed(1)} tokens/s`);
    if (first) words.push(`first after ${((first - sent) / 1000).toFixed(1)} s`);
    const cached = usage?.prompt_tokens_details?.cached_tokens;
    if (usage) words.push(`${number(cached ?? 0)} of ${number(usage.prompt_tokens)} prompt tokens read before`);
    if (stopped) words.push("stopped");
    else if (turn.reason === "length") words.push(`cut at ${lce.some(turn.body.max_tokens, "token")}`);
    figures.append(words.join(" · "), " ");
    const onclick = () => watch(turn, n);
    if (n) figures.append(el("button", { type: "button", class: "plain", onclick }, "Watch what it attended"));
  }

  // Watching ---------------------------------------------------------------------------------------------------------

  async function watch(turn, n) {
    if (running) return;
    await run("the question runs again, and is recorded …", async (signal) => {
      const said = await ask("inspect", { ...turn.body, max_tokens: Math.min(n, MOST_WATCHED) }, signal),
        recording = await said.json(),
        frame = get("picture");
      get("watch").hidden = false;
      if (!frame.src)
        await new Promise((loaded) => {
          frame.onload = loaded;
          frame.src = "inspect";
        });
      frame.contentWindow.lce.open(recording);
      get("watch").scrollIntoView({ behavior: lce.still() ? "auto" : "smooth" });
      frame.focus({ preventScroll: true });
    });
  }

  // Controls ---------------------------------------------------------------------------------------------------------

  function busy(is, words) {
    get("send").disabled = is;
    get("stop").disabled = !is;
    get("state").textContent = words;
    get("progress").hidden = true;
  }

  function progress(done, total) {
    Object.assign(get("progress"), { max: total, value: done, hidden: false });
    get("state").textContent = `${number(done)} of ${number(total)} tokens are read`;
  }

  function fail(error) {
    get("error").hidden = !error;
    get("error").textContent = error?.message ?? "";
  }

  const on = (id, type, then) => get(id).addEventListener(type, then);
  lce.settings(() => {});
  on("key", "submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem("lce.key", get("key-text").value);
    get("key-text").value = "";
    begin();
  });
  on("file", "change", takeFile);
  on("text", "input", () => {
    [file, get("file").value] = [null, ""]; // what was given last counts
    changed();
  });
  on("context", "change", changed);
  on("ask", "submit", (event) => {
    event.preventDefault();
    send();
  });
  on("question", "keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    get("ask").requestSubmit();
  });
  on("stop", "click", () => running?.abort());
  on("new", "click", forget);
  on("close", "click", () => {
    get("watch").hidden = true;
    get("question").focus();
  });
  begin();
})();
