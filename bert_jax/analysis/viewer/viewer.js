"use strict";
// Draws the page. Weights are decompressed per head; a head's weights are a Float32Array [query][key].

const about = JSON.parse(document.getElementById("about").textContent);
const { tokens, types, drawing } = about;
const T = tokens.length;
const SVG = "http://www.w3.org/2000/svg";
const THUMBNAIL = 64; // largest number of rows of a small image
const MAX_LINES_TOKENS = 128; // longer texts are first shown as a heatmap
const FIGURE = 620; // largest width of a heatmap, in CSS pixels, if the text is not longer
const byId = (id) => document.getElementById(id);
const squares = Float32Array.from({ length: 256 }, (_, level) => (level / about.levels) ** 2);
const levelsOf = new Map(); // "layer-head" -> Uint8Array [key][query]
const state = { layer: about.first[0], head: about.first[1], picked: null };

// Weights

async function levels(layer, head) {
  const name = `${layer}-${head}`;
  if (!levelsOf.has(name)) {
    const text = atob(byId(`weights-${name}`).textContent);
    const bytes = Uint8Array.from(text, (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    levelsOf.set(name, new Uint8Array(await new Response(stream).arrayBuffer()));
    byId(`weights-${name}`).remove();
  }
  return levelsOf.get(name);
}

async function weightsOf(layer, head) {
  const stored = await levels(layer, head);
  const weights = new Float32Array(T * T);
  for (let key = 0, at = 0; key < T; key++) {
    for (let query = 0; query < T; query++) weights[query * T + key] = squares[stored[at++]];
  }
  if (byId("values").value === "norms") weighByNorms(weights, about.norms[layer][head]);
  return weights;
}

function weighByNorms(weights, norms) {
  for (let query = 0; query < T; query++) {
    let sum = 0;
    for (let key = 0; key < T; key++) sum += weights[query * T + key] *= norms[key];
    for (let key = 0; key < T; key++) weights[query * T + key] /= sum || 1;
  }
}

// Colors: from the page's background to the color of the largest weight

function rgb(color) {
  const context = document.createElement("canvas").getContext("2d");
  context.fillStyle = color;
  const hex = parseInt(context.fillStyle.slice(1), 16);
  return [hex >> 16, (hex >> 8) & 255, hex & 255];
}

function shades(from, to) {
  const [a, b] = [rgb(from), rgb(to)];
  return Uint32Array.from({ length: 256 }, (_, i) => {
    const [red, green, blue] = a.map((value, c) => Math.round(value + ((b[c] - value) * i) / 255));
    return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0; // little-endian RGBA
  });
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const pageShades = () => shades(css("--page"), css("--above"));

function paint(canvas, size, weights, colors) {
  canvas.width = canvas.height = size;
  const context = canvas.getContext("2d");
  const image = context.createImageData(size, size);
  const pixels = new Uint32Array(image.data.buffer);
  for (let i = 0; i < pixels.length; i++) pixels[i] = colors[Math.round(255 * Math.sqrt(Math.min(1, weights[i])))];
  context.putImageData(image, 0, 0);
}

// All heads

function buildGrid() {
  const grid = byId("grid");
  grid.style.gridTemplateColumns = `auto repeat(${about.heads}, minmax(24px, 1fr))`;
  const cells = ["layer \\ head", ...Array(about.heads).keys()].map((label) => {
    const cell = document.createElement("span");
    cell.textContent = label;
    return cell;
  });
  for (let layer = 0; layer < about.layers; layer++) {
    const label = document.createElement("span");
    label.textContent = layer;
    cells.push(label);
    for (let head = 0; head < about.heads; head++) {
      const button = document.createElement("button");
      button.type = "button";
      button.id = `button-${layer}-${head}`;
      button.title = `layer ${layer}, head ${head}`;
      button.setAttribute("aria-label", button.title);
      button.append(document.createElement("canvas"));
      button.addEventListener("click", () => show(layer, head));
      cells.push(button);
    }
  }
  grid.append(...cells);
}

function shrink(weights) {
  const size = Math.min(T, THUMBNAIL);
  const small = new Float32Array(size * size);
  for (let query = 0; query < T; query++) {
    const row = Math.floor((query * size) / T) * size;
    for (let key = 0; key < T; key++) {
      const at = row + Math.floor((key * size) / T);
      if (weights[query * T + key] > small[at]) small[at] = weights[query * T + key];
    }
  }
  return small;
}

let overviewRun = 0;
async function drawOverview() {
  const run = ++overviewRun; // a newer call stops an older one
  const colors = pageShades();
  for (let layer = 0; layer < about.layers; layer++) {
    for (let head = 0; head < about.heads; head++) {
      const small = shrink(await weightsOf(layer, head));
      if (run !== overviewRun) return;
      paint(byId(`button-${layer}-${head}`).firstChild, Math.min(T, THUMBNAIL), small, colors);
    }
    await new Promise((resume) => setTimeout(resume)); // the page stays responsive
  }
  document.body.dataset.ready = "yes";
}

// One head

function element(parent, name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function shown() {
  const wanted = byId("filter").value.toLowerCase();
  const side = byId("side").value;
  const [from, to] = byId("parts").value;
  const matches = tokens.map((token) => token.toLowerCase().includes(wanted));
  const hidden = byId("boundary").checked ? about.boundary : [];
  return (query, key) =>
    !(hidden[query] || hidden[key]) &&
    (from === undefined || (types[query] === +from && types[key] === +to)) &&
    (!wanted || (side !== "key" && matches[query]) || (side !== "query" && matches[key]));
}

const leastWeight = () => 10 ** byId("least").value;
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const digits = (weight) => (weight >= 0.0995 ? weight.toFixed(2) : weight < 1e-4 ? "< 0.0001" : weight.toPrecision(2));
const heading = () => {
  const values = byId("values").value === "norms" ? "norm-weighted attention" : "attention probabilities";
  return `layer ${state.layer}, head ${state.head}: ${values}`;
};

function startSvg(width, height, note) {
  const svg = document.createElementNS(SVG, "svg");
  const size = { width, height, viewBox: `0 0 ${width} ${height}`, "font-size": drawing.font };
  for (const [key, value] of Object.entries(size)) svg.setAttribute(key, value);
  svg.setAttribute("font-family", "system-ui, Arial, sans-serif");
  element(svg, "text", { x: 8, y: 14 }, heading());
  element(svg, "text", { x: 8, y: 29, class: "note" }, note);
  return svg;
}

const middle = (index) => drawing.top + drawing.row * (index + 0.5);

function addLine(parent, query, key, weight) {
  element(parent, "line", {
    x1: drawing.left + drawing.gap,
    y1: middle(query),
    x2: drawing.right - drawing.gap,
    y2: middle(key),
    "stroke-opacity": (drawing.faintest + (1 - drawing.faintest) * Math.min(1, weight)).toFixed(3),
  });
}

function linesView(weights) {
  const [least, isShown, chosen] = [leastWeight(), shown(), []];
  let total = 0;
  for (let at = 0; at < T * T; at++) {
    total += weights[at];
    if (weights[at] >= least && isShown(Math.floor(at / T), at % T)) chosen.push(at);
  }
  chosen.sort((a, b) => weights[a] - weights[b]);
  const drawn = chosen.slice(-drawing.most_lines);
  const share = drawn.reduce((sum, at) => sum + weights[at], 0) / total;
  const more = drawn.length < chosen.length ? `, the largest of ${chosen.length.toLocaleString("en")}` : "";
  const note = `${drawn.length.toLocaleString("en")} weights of at least ${digits(least)}${more}: ${percent(share)} of all attention`;
  const svg = startSvg(drawing.width, drawing.top + drawing.row * (T + 1), note);
  const lines = element(svg, "g", { class: "lines" });
  for (const at of drawn) addLine(lines, Math.floor(at / T), at % T, weights[at]);
  element(svg, "g", { class: "chosen" });
  types.forEach((type, index) => {
    const y = drawing.top + drawing.row * index;
    if (index && type > types[index - 1]) element(svg, "line", { x1: 0, x2: drawing.width, y1: y, y2: y, class: "rule" });
  });
  for (const side of ["query", "key"]) addTokens(svg, side, weights);
  return svg;
}

function addTokens(svg, side, weights) {
  const isQuery = side === "query";
  const column = element(svg, "g", { class: side });
  const width = drawing.left;
  tokens.forEach((token, index) => {
    const group = element(column, "g", { class: "token" });
    const x = isQuery ? drawing.left - width : drawing.right;
    element(group, "rect", { x, y: middle(index) - drawing.row / 2, width, height: drawing.row });
    const place = { x: isQuery ? drawing.left : drawing.right, y: middle(index) + 4 };
    element(group, "text", { ...place, "text-anchor": isQuery ? "end" : "start" }, token);
    group.addEventListener("mouseenter", () => choose(svg, side, index, weights));
    group.addEventListener("mouseleave", () => choose(svg, state.picked?.side, state.picked?.index, weights));
    group.addEventListener("click", () => {
      const again = state.picked?.side === side && state.picked.index === index;
      state.picked = again ? null : { side, index };
      choose(svg, side, again ? undefined : index, weights);
    });
  });
}

// All weights of one token as lines, and as the shade of the tokens on the other side; without an index, of none.
function choose(svg, side, index, weights) {
  const lines = svg.querySelector(".chosen");
  lines.replaceChildren();
  for (const group of svg.querySelectorAll(".weighted, .picked")) {
    group.classList.remove("weighted", "picked");
    group.firstChild.removeAttribute("fill-opacity");
  }
  svg.classList.toggle("choosing", index !== undefined);
  if (index === undefined) return describe(weights);
  const isQuery = side === "query";
  const others = svg.querySelector(isQuery ? ".key" : ".query").children;
  svg.querySelector(`.${side}`).children[index].classList.add("picked");
  for (let other = 0; other < T; other++) {
    const weight = isQuery ? weights[index * T + other] : weights[other * T + index];
    if (weight < 0.001) continue;
    addLine(lines, isQuery ? index : other, isQuery ? other : index, weight);
    others[other].classList.add("weighted");
    others[other].firstChild.setAttribute("fill-opacity", (0.75 * Math.min(1, weight) ** 0.5).toFixed(3));
  }
  describe(weights, side, index);
}

// The line above the figure: the largest weights of a token, or of the head.
function describe(weights, side, index) {
  const isQuery = side === "query";
  const status = byId("status");
  const entry = (token, at) => `${tokens[token]} (${token}) ${digits(weights[at])}`;
  if (index === undefined) {
    const top = weights.reduce((best, weight, at) => (weight > weights[best] ? at : best), 0);
    const [query, key] = [Math.floor(top / T), top % T];
    status.textContent = `Largest weight: query ${tokens[query]} (${query}) → key ${tokens[key]} (${key}): ${digits(weights[top])}.`;
    return;
  }
  const at = (other) => (isQuery ? index * T + other : other * T + index);
  const order = [...tokens.keys()].sort((a, b) => weights[at(b)] - weights[at(a)]).slice(0, 8);
  const listed = order.map((other) => entry(other, at(other))).join(" · ");
  const name = document.createElement("b");
  name.textContent = `${tokens[index]} (${index})`;
  status.replaceChildren(isQuery ? "Query " : "Key ", name, isQuery ? " attends to " : " is attended to by ", listed);
}

function heatmapView(weights, colors) {
  const isShown = shown();
  const drawn = weights.map((weight, at) => (isShown(Math.floor(at / T), at % T) ? weight : 0));
  const canvas = document.createElement("canvas");
  paint(canvas, T, drawn, colors);
  const cell = Math.max(1, Math.min(22, FIGURE / T));
  const named = cell >= drawing.font - 1;
  const longest = Math.max(...tokens.map((token) => token.length));
  const [left, top] = named ? [24 + 6.5 * longest, 50 + 6.5 * longest] : [50, 66];
  const note = "rows: queries, columns: keys; shade: square root of the weight";
  const svg = startSvg(Math.max(380, left + cell * T + 16), top + cell * T + 16, note);
  const area = { x: left, y: top, width: cell * T, height: cell * T };
  element(svg, "image", { ...area, href: canvas.toDataURL(), preserveAspectRatio: "none" });
  element(svg, "rect", { ...area, class: "frame" });
  const step = named ? 1 : T > 200 ? 50 : 10;
  for (let index = 0; index < T; index += step) {
    const at = (index + 0.5) * cell;
    const label = named ? tokens[index] : index;
    element(svg, "text", { x: left - 5, y: top + at + 4, "text-anchor": "end" }, label);
    const turned = { transform: `translate(${left + at + 4} ${top - 5}) rotate(-90)` };
    element(svg, "text", named ? turned : { x: left + at, y: top - 5, "text-anchor": "middle" }, label);
  }
  const cross = element(svg, "path", { class: "cross" });
  svg.addEventListener("mousemove", (event) => {
    const box = svg.getBoundingClientRect();
    const key = Math.floor((event.clientX - box.left - left) / cell);
    const query = Math.floor((event.clientY - box.top - top) / cell);
    const inside = Math.min(query, key) >= 0 && Math.max(query, key) < T;
    const [x, y, side] = [left + key * cell, top + query * cell, cell * T];
    const lines = `M${left} ${y}h${side}M${left} ${y + cell}h${side}M${x} ${top}v${side}M${x + cell} ${top}v${side}`;
    cross.setAttribute("d", inside ? lines : "");
    if (!inside) return describe(weights);
    describe(weights, "query", query);
    const pair = `Query ${tokens[query]} (${query}) → key ${tokens[key]} (${key}): ${digits(weights[query * T + key])}`;
    byId("status").prepend(pair, document.createElement("br"));
  });
  return svg;
}

// Only where the overview scrolls by itself: on a narrow screen the page would jump over the text above it.
function scrollOverview(button) {
  const overview = byId("overview");
  const top = button.offsetTop - overview.offsetTop;
  const isVisible = top >= overview.scrollTop && top + button.offsetHeight <= overview.scrollTop + overview.clientHeight;
  if (!isVisible) overview.scrollTop = top;
}

async function show(layer = state.layer, head = state.head) {
  byId(`button-${state.layer}-${state.head}`).setAttribute("aria-pressed", "false");
  Object.assign(state, { layer, head });
  const button = byId(`button-${layer}-${head}`);
  button.setAttribute("aria-pressed", "true");
  scrollOverview(button);
  [byId("layer").value, byId("head").value] = [layer, head];
  byId("least-value").textContent = digits(leastWeight());
  byId("least").disabled = byId("view").value === "heatmap";
  const weights = await weightsOf(layer, head);
  if (state.layer !== layer || state.head !== head) return; // another head was selected meanwhile
  const isLines = byId("view").value === "lines";
  const svg = isLines ? linesView(weights) : heatmapView(weights, pageShades());
  byId("figure").replaceChildren(svg);
  if (isLines) choose(svg, state.picked?.side, state.picked?.index, weights);
  else describe(weights);
}

// The shown figure as a file with the light page's colors, whatever the page has.
async function save() {
  const isLines = byId("view").value === "lines";
  const weights = isLines ? null : await weightsOf(state.layer, state.head);
  const shown = byId("figure").firstChild;
  const svg = isLines ? shown.cloneNode(true) : heatmapView(weights, shades(about.light.page, about.shade));
  const { page, text, grey, rule, line } = about.light;
  const style = document.createElementNS(SVG, "style");
  style.textContent =
    `text{fill:${text}}.note{fill:${grey}}.lines,.chosen{stroke:${line};stroke-width:1.5}.choosing .lines{display:none}` +
    `.token rect{fill:none}.token.weighted rect{fill:${line}}.rule{stroke:${rule}}.frame,.cross{fill:none;stroke:${rule}}` +
    "image{image-rendering:pixelated}";
  const ground = document.createElementNS(SVG, "rect");
  for (const [key, value] of Object.entries({ width: "100%", height: "100%", fill: page })) ground.setAttribute(key, value);
  svg.prepend(style, ground);
  svg.setAttribute("xmlns", SVG);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([new XMLSerializer().serializeToString(svg)], { type: "image/svg+xml" }));
  link.download = `layer-${state.layer}-head-${state.head}.svg`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// Controls

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") {
    state.picked = null;
    return show();
  }
  if (/^(INPUT|SELECT)$/.test(event.target.tagName)) return;
  const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key] ?? [];
  if (down === undefined) return;
  event.preventDefault();
  const bounded = (value, count) => Math.max(0, Math.min(count - 1, value));
  show(bounded(state.layer + down, about.layers), bounded(state.head + right, about.heads));
}

function start() {
  if (typeof DecompressionStream === "undefined") {
    byId("status").textContent = "This browser cannot decompress the weights: use Chrome 80, Firefox 113, Safari 16.4 or a later one.";
    return;
  }
  for (const [id, count] of [["layer", about.layers], ["head", about.heads]]) {
    for (let index = 0; index < count; index++) byId(id).append(new Option(index, index));
    byId(id).addEventListener("change", () => show(+byId("layer").value, +byId("head").value));
  }
  byId("parts-label").hidden = !types.includes(1);
  byId("view").value = T > MAX_LINES_TOKENS ? "heatmap" : "lines";
  for (const id of ["view", "parts", "least", "filter", "side", "boundary"]) byId(id).addEventListener("input", () => show());
  byId("values").addEventListener("input", () => Promise.all([show(), drawOverview()]));
  byId("save").addEventListener("click", save);
  document.addEventListener("keydown", onKey);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => Promise.all([show(), drawOverview()]));
  buildGrid();
  show().then(drawOverview);
}

start();
