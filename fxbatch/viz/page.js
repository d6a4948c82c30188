"use strict";
// What Python drew, made tangible: stages, zoom and pan, cards, search, legend, light and dark.
// Decides nothing: positions and texts come from the templates and from the data element.
const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const one = (selector, from = document) => from.querySelector(selector);
const all = (selector, from = document) => Array.from(from.querySelectorAll(selector));

// ---- a view: one picture that zooms and pans ------------------------------------------------------------
class View {
  constructor(section) {
    this.section = section;
    this.canvas = one(".canvas", section);
    this.box = { x: 0, y: 0, w: 1, h: 1 };
    this.canvas.addEventListener("wheel", (e) => this.wheel(e), { passive: false });
    this.canvas.addEventListener("pointerdown", (e) => this.press(e));
    this.canvas.addEventListener("dblclick", () => this.fit());
    this.canvas.addEventListener("pointerover", (e) => this.over(e));
    this.canvas.addEventListener("pointermove", (e) => moveCard(e));
    this.canvas.addEventListener("pointerleave", () => leave());
    for (const button of all("[data-zoom]", section)) {
      button.addEventListener("click", () => this.command(button.dataset.zoom));
    }
    new ResizeObserver(() => this.resize()).observe(this.canvas);
  }
  show(name) {
    this.name = name;
    this.picture = data.pictures[name];
    this.svg = document.getElementById("picture-" + name).content.querySelector("svg").cloneNode(true);
    const size = this.svg.viewBox.baseVal;
    this.full = { x: 0, y: 0, w: size.width, h: size.height };
    this.svg.removeAttribute("width");
    this.svg.removeAttribute("height");
    this.svg.setAttribute("preserveAspectRatio", "xMidYMin meet");
    this.canvas.replaceChildren(this.svg);
    one(".note", this.section).textContent = this.picture.note;
    this.boxes = new Map(all(".box", this.svg).map((g) => [g.dataset.id, g]));
    this.arrows = all(".arrow", this.svg);
    this.fit();
  }
  size() {
    return { w: Math.max(this.canvas.clientWidth, 10), h: Math.max(this.canvas.clientHeight, 10) };
  }
  fit() { // everything, as long as text stays readable; else the beginning
    const { w, h } = this.size();
    const whole = Math.min(w / this.full.w, h / this.full.h);
    const scale = Math.min(Math.max(whole, 0.5), 1.35);
    this.scale = scale;
    const bw = w / scale, bh = h / scale;
    const x = bw >= this.full.w ? (this.full.w - bw) / 2 : 0;
    const y = bh >= this.full.h ? (this.full.h - bh) / 2 : ["timeline", "trace", "source", "time"].includes(this.name) ? 0 : (this.full.h - bh) / 2;
    this.place({ x, y, w: bw, h: bh });
  }
  whole() {
    const { w, h } = this.size();
    const scale = Math.min(w / this.full.w, h / this.full.h);
    this.place({ x: (this.full.w - w / scale) / 2, y: 0, w: w / scale, h: h / scale });
  }
  resize() {
    if (!this.svg) return;
    const { w, h } = this.size();
    this.place({ x: this.box.x, y: this.box.y, w: w / this.scale, h: h / this.scale });
  }
  place(box) {
    const { w, h } = this.size();
    this.scale = Math.min(w / box.w, h / box.h);
    this.box = box;
    this.svg.setAttribute("viewBox", `${box.x} ${box.y} ${box.w} ${box.h}`);
  }
  zoom(factor, clientX, clientY) {
    const r = this.canvas.getBoundingClientRect();
    const { w, h } = this.size();
    const scale = Math.min(Math.max(this.scale * factor, 0.03), 12);
    const fx = clientX === undefined ? 0.5 : (clientX - r.left) / w;
    const fy = clientY === undefined ? 0.5 : (clientY - r.top) / h;
    const x = this.box.x + fx * (this.box.w - w / scale), y = this.box.y + fy * (this.box.h - h / scale);
    this.place({ x, y, w: w / scale, h: h / scale });
  }
  command(what) {
    if (what === "in") this.zoom(1.3);
    else if (what === "out") this.zoom(1 / 1.3);
    else if (this.scale > Math.min(this.size().w / this.full.w, this.size().h / this.full.h) * 1.001) this.whole();
    else this.fit();
  }
  wheel(e) {
    e.preventDefault();
    if (e.shiftKey) this.place({ ...this.box, x: this.box.x + (e.deltaY + e.deltaX) / this.scale });
    else this.zoom(Math.exp(-e.deltaY * (e.deltaMode ? 0.05 : 0.0016)), e.clientX, e.clientY);
  }
  press(e) {
    const start = { x: e.clientX, y: e.clientY, box: this.box, moved: false };
    const target = e.target.closest(".box");
    const move = (m) => {
      const dx = m.clientX - start.x, dy = m.clientY - start.y;
      start.moved ||= Math.abs(dx) + Math.abs(dy) > 4;
      if (!start.moved) return;
      this.canvas.classList.add("dragging");
      this.place({ ...start.box, x: start.box.x - dx / this.scale, y: start.box.y - dy / this.scale });
    };
    const up = (u) => {
      removeEventListener("pointermove", move);
      removeEventListener("pointerup", up);
      this.canvas.classList.remove("dragging");
      if (!start.moved) keep(this, target, u);
    };
    addEventListener("pointermove", move);
    addEventListener("pointerup", up);
  }
  over(e) {
    const target = e.target.closest(".box");
    if (target) hover(this, target, e);
    else leave();
  }
  center(g) {
    const b = one("rect", g);
    const x = +b.getAttribute("x") + b.getAttribute("width") / 2, y = +b.getAttribute("y") + b.getAttribute("height") / 2;
    const scale = Math.max(this.scale, 0.9), { w, h } = this.size();
    this.place({ x: x - w / scale / 2, y: y - h / scale / 2, w: w / scale, h: h / scale });
  }
  light(chosen, arrows = []) { // null: nothing is dimmed
    for (const g of all(".lit", this.svg)) g.classList.remove("lit");
    this.svg.classList.toggle("dim", chosen !== null);
    for (const g of chosen ?? []) g.classList.add("lit");
    for (const a of arrows) a.classList.add("lit");
  }
  around(g) { // a box, its arrows, and the boxes at their other ends
    const id = g.dataset.id;
    const arrows = this.arrows.filter((a) => a.dataset.a === id || a.dataset.b === id);
    const ids = new Set([id, ...arrows.flatMap((a) => [a.dataset.a, a.dataset.b])]);
    this.light([...ids].map((i) => this.boxes.get(i)), arrows);
  }
  ofStep(step) {
    return all(`.box[data-step="${Number(step)}"]`, this.svg);
  }
  ofSignature(number) {
    return all(`.box[data-sig="${Number(number)}"]`, this.svg);
  }
}

const graph = new View(document.getElementById("graph"));
const timeline = new View(document.getElementById("timeline"));
const views = [graph, timeline];

// ---- the card -------------------------------------------------------------------------------------------
const card = document.getElementById("card");
let kept = false;
function element(name, text, parent) {
  const made = document.createElement(name);
  made.textContent = text;
  parent.append(made);
  return made;
}
function fillCard(view, g) {
  const box = view.picture.boxes[g.dataset.id];
  const signature = data.signatures[box.signature];
  card.replaceChildren();
  const head = element("h3", signature ? signature.name : box.kind, card);
  element("span", signature ? `${box.kind}, ${signature.kind}` : "", head);
  if (signature) element("code", signature.text, card);
  const list = element("dl", "", card);
  const line = (name, value) => {
    if (value === "" || value === undefined) return;
    element("dt", name, list);
    element("dd", value, list);
  };
  if (box.label && (!signature || box.label !== signature.name)) line("shows", box.label);
  for (const [name, value] of box.info) line(name, value);
  if (box.step >= 0 && !box.info.some(([name]) => name === "step")) line("step", String(box.step));
  if (!signature) return;
  line("takes", signature.inputs.join(", "));
  line("gives", signature.outputs.join(", "));
  line("parameters", signature.shared.join(", "));
  line("line", signature.location);
  line("rule", signature.rule);
  line("not batched", signature.reason);
  line("modes", signature.modes);
}
function moveCard(e) {
  if (card.hidden || kept) return;
  const w = card.offsetWidth, h = card.offsetHeight, gap = 16;
  const x = e.clientX + gap + w > innerWidth ? e.clientX - gap - w : e.clientX + gap;
  const y = Math.min(e.clientY + gap, innerHeight - h - 8);
  card.style.left = Math.max(x, 4) + "px";
  card.style.top = Math.max(y, 4) + "px";
}
function hover(view, g, e) {
  if (kept) return;
  fillCard(view, g);
  card.hidden = false;
  moveCard(e);
  view.around(g);
  const other = views.find((v) => v !== view);
  const same = g.dataset.step === undefined ? [] : other.ofStep(g.dataset.step);
  other.light(same.length ? same : g.dataset.sig >= 0 ? other.ofSignature(g.dataset.sig) : null);
}
function leave() {
  if (kept) return;
  card.hidden = true;
  relight();
}
function keep(view, g, e) {
  kept = false;
  card.classList.remove("kept");
  leave();
  if (!g) return;
  hover(view, g, e);
  kept = true;
  card.classList.add("kept");
}

// ---- search and legend ----------------------------------------------------------------------------------
const search = document.getElementById("search");
const found = document.getElementById("found");
let hits = [], at = -1, chosen = null;
function textOf(view, id) {
  const box = view.picture.boxes[id];
  const s = data.signatures[box.signature];
  const signature = s ? [s.name, s.text, s.location, s.rule, s.reason] : [];
  return [box.label, box.kind, ...signature, ...box.info.map(([name, value]) => `${name} ${value}`)].join("\n").toLowerCase();
}
function runSearch() {
  const query = search.value.trim().toLowerCase();
  hits = [];
  at = -1;
  for (const view of views) {
    for (const [id, g] of view.boxes) {
      g.classList.remove("hit", "here");
      if (query && textOf(view, id).includes(query)) {
        g.classList.add("hit");
        hits.push([view, g]);
      }
    }
  }
  const many = hits.filter(([view]) => view === graph).length;
  found.textContent = query ? `${many} found` : "";
  relight();
}
function nextHit(by) {
  if (!hits.length) return;
  if (at >= 0) hits[at][1].classList.remove("here");
  at = (at + by + hits.length) % hits.length;
  hits[at][1].classList.add("here");
  hits[at][0].center(hits[at][1]);
}
function relight() {
  const query = search.value.trim() !== "";
  for (const view of views) {
    if (!view.svg) continue;
    if (chosen !== null) view.light(view.ofSignature(chosen));
    else view.light(query ? [] : null);
  }
}
search.addEventListener("input", runSearch);
search.addEventListener("keydown", (e) => {
  if (e.key === "Enter") nextHit(e.shiftKey ? -1 : 1);
  if (e.key === "Escape") { search.value = ""; runSearch(); search.blur(); }
  e.stopPropagation();
});
for (const row of all("#legend .row")) {
  row.addEventListener("click", () => {
    chosen = chosen === row.dataset.sig ? null : row.dataset.sig;
    for (const other of all("#legend .row")) other.classList.toggle("on", other.dataset.sig === chosen);
    relight();
  });
}

// ---- stages, keys, theme --------------------------------------------------------------------------------
const tabs = all("#tabs [role=tab]");
let current = 0;
function showStage(i, focus = false) {
  current = (i + tabs.length) % tabs.length;
  tabs.forEach((tab, k) => {
    tab.setAttribute("aria-selected", String(k === current));
    tab.tabIndex = k === current ? 0 : -1;
  });
  if (focus) tabs[current].focus();
  keep(graph, null);
  graph.show(data.stages[current].name);
  document.getElementById("caption").textContent = data.stages[current].caption;
  const runs = data.stages[current].runs;
  for (const row of all("#legend .row")) { // what is counted is what this stage shows
    row.hidden = !(row.dataset.sig in runs);
    one(".runs", row).textContent = runs[row.dataset.sig] ?? "";
  }
  runSearch();
}
tabs.forEach((tab, k) => tab.addEventListener("click", () => showStage(k)));
addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey) return;
  const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
  if (step) showStage(current + step, document.activeElement.getAttribute("role") === "tab");
  else if (e.key === "/") { e.preventDefault(); search.focus(); }
  else if (e.key === "+" || e.key === "=") graph.command("in");
  else if (e.key === "-") graph.command("out");
  else if (e.key === "0") graph.fit();
  else if (e.key === "d") flip();
  else if (e.key === "Escape") keep(graph, null);
  else if (/^[1-9]$/.test(e.key) && e.key <= tabs.length) showStage(e.key - 1);
});
function flip() {
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
}
root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
document.getElementById("theme").addEventListener("click", flip);
document.getElementById("splitter").addEventListener("pointerdown", (e) => {
  const section = document.getElementById("timeline"), start = section.clientHeight + e.clientY;
  const move = (m) => { section.style.height = Math.min(Math.max(start - m.clientY, 60), innerHeight * 0.75) + "px"; };
  addEventListener("pointermove", move);
  addEventListener("pointerup", () => removeEventListener("pointermove", move), { once: true });
  e.preventDefault();
});

// The timeline takes the height that it needs, up to a third of the window.
timeline.show("timeline");
document.getElementById("timeline").style.height =
  Math.min(Math.max(timeline.full.h * Math.min(1, timeline.size().w / timeline.full.w) + 44, 120), innerHeight * 0.36) + "px";
showStage(location.hash ? Math.max(0, data.stages.findIndex((s) => "#" + s.name === location.hash)) : 0);
requestAnimationFrame(() => { timeline.fit(); graph.fit(); });
root.dataset.ready = "true";
