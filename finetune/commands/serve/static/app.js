"use strict";
/* The chat: state, the stream, and the page. A model's text reaches the page through Markdown.render alone. */

const TEXTS = {
  en: {
    skip: "Skip to the question", newChat: "New chat", language: "Switch to Chinese", theme: "Light or dark",
    settings: "Settings", close: "Close", done: "Done", defaults: "Defaults", send: "Send", stop: "Stop",
    toEnd: "To the end", question: "Ask something", hint: "Enter sends · Shift+Enter: new line · Esc stops",
    welcome: "What would you like to know?", welcomeMore: "The conversation stays in this tab and is not stored.",
    system: "System prompt", systemNone: "None", temperature: "Temperature", topP: "Top-p", topK: "Top-k (0: all)",
    maxTokens: "Most tokens of an answer", seed: "Seed", seedNone: "random", token: "Token of this server",
    empty: "An empty field takes the model's own setting. Temperature 0 always takes the likeliest token.",
    you: "You", copy: "Copy", copied: "Copied", again: "Regenerate", edit: "Edit", stopped: "stopped",
    length: "cut: the most tokens were reached", writing: "The model writes", ready: "The answer is complete",
    needToken: "This server asks for a token: enter it in the settings.", offline: "The server cannot be reached.",
    failed: "The answer failed: ", empty_answer: "(empty answer)", retry: "Try again",
  },
  zh: {
    skip: "跳到输入框", newChat: "新对话", language: "切换到英文", theme: "浅色或深色",
    settings: "设置", close: "关闭", done: "完成", defaults: "恢复默认", send: "发送", stop: "停止",
    toEnd: "到底部", question: "请输入问题", hint: "Enter 发送 · Shift+Enter 换行 · Esc 停止",
    welcome: "想了解什么？", welcomeMore: "对话只留在此标签页中，不会被保存。",
    system: "系统提示词", systemNone: "无", temperature: "温度", topP: "Top-p", topK: "Top-k（0 为全部）",
    maxTokens: "回答的最多词元数", seed: "随机种子", seedNone: "随机", token: "本服务的令牌",
    empty: "留空则采用模型自身的设置。温度为 0 时总是取最可能的词元。",
    you: "你", copy: "复制", copied: "已复制", again: "重新生成", edit: "编辑", stopped: "已停止",
    length: "已截断：达到最多词元数", writing: "模型正在回答", ready: "回答完毕",
    needToken: "本服务需要令牌：请在设置中填写。", offline: "无法连接服务器。",
    failed: "回答失败：", empty_answer: "（空回答）", retry: "重试",
  },
};

const byId = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const state = { language: "en", model: null, turns: [], running: null, draw: 0, drawSeconds: 0, follow: true };
const DRAW_PAUSES = 4; /* between two drawings of an answer that is being written, in times of the last one */

/* ---------- what is remembered: settings for this browser, the token for this tab ---------- */

function remember(name, value, place = localStorage) {
  try { place.setItem("finetune." + name, value); } catch { /* storage may be off: then nothing is remembered */ }
}
function recall(name, place = localStorage) {
  try { return place.getItem("finetune." + name); } catch { return null; }
}

/* ---------- words ---------- */

const say = (name) => TEXTS[state.language][name];

function speak(language) {
  state.language = language;
  remember("language", language);
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  for (const node of document.querySelectorAll("[data-text]")) node.textContent = say(node.dataset.text);
  for (const node of document.querySelectorAll("[data-title]")) {
    node.title = say(node.dataset.title);
    node.setAttribute("aria-label", say(node.dataset.title));
  }
  for (const node of document.querySelectorAll("[data-placeholder]")) node.placeholder = say(node.dataset.placeholder);
  for (const node of document.querySelectorAll("[data-label]")) node.setAttribute("aria-label", say(node.dataset.label));
  for (const node of document.querySelectorAll("[data-copy]")) node.textContent = say("copy");
  byId("language").textContent = language === "zh" ? "EN" : "中文";
  announce("");
}

/* Screen readers say it; it is seen only if something is wrong. */
function announce(text, wrong = false) {
  byId("status").classList.toggle("heard", !wrong);
  byId("status").textContent = text;
}

function dress(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

/* ---------- the page of turns ---------- */

function button(name, action, className = "quiet") {
  const node = document.createElement("button");
  node.type = "button";
  node.className = className;
  node.dataset.text = name;
  node.textContent = say(name);
  node.addEventListener("click", action);
  return node;
}

function makeTurn(turn) {
  const item = document.createElement("li");
  item.className = "turn " + turn.role;
  const body = document.createElement("div");
  body.className = "body";
  item.append(body);
  const foot = document.createElement("div");
  foot.className = "foot";
  const note = document.createElement("span");
  note.className = "note";
  foot.append(note);
  item.append(foot);
  turn.nodes = { item, body, foot, note };
  byId("turns").append(item);
  drawTurn(turn);
}

function drawTurn(turn) {
  const { item, body, foot, note } = turn.nodes;
  item.classList.toggle("writing", turn === writingTurn());
  if (turn.role === "user") body.textContent = turn.content;
  else {
    body.replaceChildren();
    for (const node of Markdown.render(turn.content)) body.append(node);
  }
  for (const node of body.querySelectorAll("[data-copy]")) node.textContent = say("copy");
  const done = turn !== writingTurn();
  foot.querySelectorAll("button").forEach((node) => node.remove());
  note.textContent = turn.error || (turn.reason && say(turn.reason)) || (done && turn.role === "assistant" && !turn.content ? say("empty_answer") : "");
  note.dataset.text = turn.error ? "" : turn.reason || "";
  if (!note.dataset.text) delete note.dataset.text;
  note.classList.toggle("error", Boolean(turn.error));
  if (!done) return;
  if (turn.content) foot.append(button("copy", (event) => copyText(turn.content, event.currentTarget)));
  if (turn.role === "assistant" && turn === state.turns.at(-1)) foot.append(button(turn.error ? "retry" : "again", regenerate));
  if (turn.role === "user") foot.append(button("edit", () => edit(turn)));
}

const writingTurn = () => (state.running ? state.running.turn : null);

function drawAll() {
  byId("turns").replaceChildren();
  state.turns.forEach(makeTurn);
  byId("welcome").hidden = state.turns.length > 0;
  drawButtons();
  toEnd();
}

function drawButtons() {
  byId("send").hidden = Boolean(state.running);
  byId("stop").hidden = !state.running;
  byId("send").disabled = !byId("question").value.trim() || !state.model;
}

function toEnd(force = false) {
  if (force) state.follow = true;
  if (state.follow) byId("scroll").scrollTop = byId("scroll").scrollHeight;
  byId("down").hidden = state.follow;
}

async function copyText(text, node) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea"); /* plain http away from loopback has no clipboard */
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  node.textContent = say("copied");
  setTimeout(() => { node.textContent = say("copy"); }, 1500);
}

/* ---------- asking ---------- */

function requestBody() {
  const system = byId("system").value.trim();
  const turns = state.turns.filter((turn) => turn !== writingTurn()).map(({ role, content }) => ({ role, content }));
  const body = { model: state.model.id, stream: true, messages: system ? [{ role: "system", content: system }, ...turns] : turns };
  for (const name of NUMBERS) {
    const value = byId(name).value;
    if (value !== "" && byId(name).checkValidity()) body[name] = Number(value);
  }
  return body;
}

function headers() {
  const token = byId("token").value;
  return token ? { "content-type": "application/json", authorization: "Bearer " + token } : { "content-type": "application/json" };
}

async function answer() {
  const turn = { role: "assistant", content: "", reason: "", error: "" };
  const running = { turn, abort: new AbortController() };
  state.running = running;
  state.turns.push(turn);
  const body = requestBody();
  drawAll();
  toEnd(true);
  announce(say("writing"));
  try {
    await receive(body, running);
  } catch (error) {
    if (error.name === "AbortError") turn.reason = "stopped";
    else turn.error = error.shown || say("failed") + error.message;
  }
  if (state.running !== running) return;
  state.running = null;
  clearTimeout(state.draw);
  state.draw = 0;
  drawAllFeet();
  announce(turn.error || say(turn.reason || "ready"));
  drawButtons();
  toEnd();
}

function drawAllFeet() {
  state.turns.forEach(drawTurn);
}

async function receive(body, { turn, abort }) {
  let response;
  try {
    response = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal: abort.signal });
  } catch (error) {
    if (error.name !== "AbortError") error.shown = say("offline");
    throw error;
  }
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    rest += value;
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) take(event, turn);
  }
}

function take(event, turn) {
  if (!event.startsWith("data: ") || event === "data: [DONE]") return;
  const chunk = JSON.parse(event.slice(6));
  if (chunk.error) throw new Error(chunk.error.message);
  const choice = chunk.choices[0];
  if (!choice) return;
  if (choice.finish_reason === "length") turn.reason = "length";
  if (choice.delta.content) {
    turn.content += choice.delta.content;
    drawSoon(turn);
  }
}

/* The whole answer is drawn anew as it grows; the longer that takes, the more seldom, so that the page stays free. */
function drawSoon(turn) {
  if (state.draw) return;
  state.draw = setTimeout(() => {
    const began = performance.now();
    state.draw = 0;
    drawTurn(turn);
    toEnd();
    state.drawSeconds = (performance.now() - began) / 1000;
  }, Math.max(16, DRAW_PAUSES * 1000 * state.drawSeconds));
}

async function failure(response) {
  let message = response.status + " " + response.statusText;
  try { message = (await response.json()).error.message; } catch { /* not from our server: the status must do */ }
  const error = new Error(message);
  if (response.status === 401) {
    error.shown = say("needToken");
    byId("token-row").hidden = false;
  }
  return error;
}

function stop() {
  if (state.running) state.running.abort.abort();
}

function regenerate() {
  if (state.running) return;
  if (state.turns.at(-1)?.role === "assistant") state.turns.pop();
  answer();
}

function edit(turn) {
  if (state.running) return;
  byId("question").value = turn.content;
  state.turns.splice(state.turns.indexOf(turn));
  drawAll();
  grow();
  byId("question").focus();
}

function beginAnew() {
  stop();
  state.running = null;
  state.turns = [];
  drawAll();
  announce("");
  byId("question").focus();
}

/* ---------- the model ---------- */

async function meet() {
  try {
    const response = await fetch("/v1/models", { headers: headers() });
    if (!response.ok) throw await failure(response);
    state.model = (await response.json()).data[0];
  } catch (error) {
    state.model = null;
    announce(error.shown || say("offline"), true);
    if (!byId("token-row").hidden) openSettings();
    return;
  }
  byId("model").textContent = state.model.id;
  document.title = state.model.id;
  announce("");
  const own = { ...state.model.sampling, max_tokens: state.model.max_new_tokens, seed: null };
  for (const name of NUMBERS) if (own[name] !== null && own[name] !== undefined) byId(name).placeholder = String(own[name]);
  drawButtons();
}

function openSettings() {
  if (!byId("settings").open) byId("settings").showModal();
}

/* ---------- beginning ---------- */

function grow() {
  const area = byId("question");
  area.style.height = "auto";
  area.style.height = Math.min(area.scrollHeight, innerHeight * 0.4) + "px";
  drawButtons();
}

function send() {
  const text = byId("question").value.trim();
  if (!text || state.running || !state.model) return;
  byId("question").value = "";
  state.turns.push({ role: "user", content: text });
  grow();
  answer();
}

function begin() {
  speak(recall("language") || (navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en"));
  dress(recall("theme"));
  for (const name of ["system", ...NUMBERS]) {
    byId(name).value = recall(name) || "";
    byId(name).addEventListener("change", () => remember(name, byId(name).value));
  }
  byId("token").value = recall("token", sessionStorage) || "";
  byId("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  byId("question").addEventListener("input", grow);
  byId("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !byId("settings").open) stop();
  });
  byId("stop").addEventListener("click", () => { stop(); byId("question").focus(); });
  byId("new").addEventListener("click", beginAnew);
  byId("language").addEventListener("click", () => { speak(state.language === "zh" ? "en" : "zh"); drawAllFeet(); });
  byId("theme").addEventListener("click", () => {
    const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
    dress(dark ? "light" : "dark");
    remember("theme", dark ? "light" : "dark");
  });
  byId("settings-open").addEventListener("click", openSettings);
  byId("settings").addEventListener("close", () => {
    remember("token", byId("token").value, sessionStorage);
    if (!state.model) meet();
    byId("question").focus();
  });
  byId("defaults").addEventListener("click", () => {
    for (const name of ["system", ...NUMBERS]) { byId(name).value = ""; remember(name, ""); }
  });
  byId("turns").addEventListener("click", (event) => {
    const node = event.target.closest("[data-copy]");
    if (node) copyText(node.closest(".code").querySelector("code").textContent, node);
  });
  byId("scroll").addEventListener("scroll", () => {
    const place = byId("scroll");
    state.follow = place.scrollHeight - place.scrollTop - place.clientHeight < 60;
    byId("down").hidden = state.follow;
  }, { passive: true });
  byId("down").addEventListener("click", () => toEnd(true));
  drawAll();
  grow();
  meet();
  byId("question").focus();
}

begin();
