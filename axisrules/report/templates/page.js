"use strict";
(() => {
const DATA = JSON.parse(document.getElementById("data").textContent);
const NS = "http://www.w3.org/2000/svg", LISTED = 200, DRAWN = 1500;
const state = { plan: 0, filter: "", chosen: null };
const $ = (id) => document.getElementById(id);
const number = (n) => n.toLocaleString("en-US");

function make(tag, attributes = {}, text) {
  const svg = ["svg", "g", "rect", "text", "title"].includes(tag);
  const node = svg ? document.createElementNS(NS, tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

const plan = () => DATA.plans[state.plan];
const kindOf = (item) => plan().kinds[item.kind];
const layoutOf = (kind) => kind.split.length ? kind.split.join(" + ") : "replicated";
const colour = (layout) => layout === "replicated" ? "hsl(0 0% 60%)" :
  `hsl(${(plan().layouts.indexOf(layout) * 137.5 + 200) % 360} 65% 50%)`;

function matching() {
  const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
  return plan().items.filter((item) => {
    const kind = kindOf(item);
    const text = `${item.label} ${kind.names} ${kind.spec} ${layoutOf(kind)} ${kind.mark} ${kind.dtype}`.toLowerCase();
    return words.every((word) => text.includes(word) || text.includes(word.replace(/\d+/g, "*")));
  }).sort((a, b) => kindOf(b).held * b.count - kindOf(a).held * a.count);
}

// A squarified treemap: rows of rectangles along the shorter side, each as square as can be.
function squarify(items, x, y, width, height) {
  const placed = [];
  const total = items.reduce((sum, one) => sum + one.size, 0);
  const scale = total ? width * height / total : 0;
  let row = [], area = 0, start = 0;
  const worst = (low, high, sum, side) =>
    Math.max(side * side * high / (sum * sum), sum * sum / (side * side * low));
  const flush = () => {
    const wide = width >= height, side = wide ? height : width, depth = side ? area / side : 0;
    let at = 0;
    for (const one of row) {
      const length = depth ? one.area / depth : 0;
      placed.push(wide ? { ...one, x, y: y + at, width: depth, height: length }
                       : { ...one, x: x + at, y, width: length, height: depth });
      at += length;
    }
    if (wide) { x += depth; width -= depth; } else { y += depth; height -= depth; }
    row = []; area = 0;
  };
  for (; start < items.length; start++) {
    const one = { ...items[start], area: items[start].size * scale };
    const side = Math.min(width, height);
    if (row.length) {
      const before = worst(row[row.length - 1].area, row[0].area, area, side);
      const after = worst(one.area, row[0].area, area + one.area, side);
      if (after > before) flush();
    }
    row.push(one); area += one.area;
  }
  if (row.length) flush();
  return placed;
}

function onPress(node, act) {
  node.addEventListener("click", act);
  node.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(); }
  });
}

function drawMap(items) {
  const width = Math.max($("map").clientWidth, 280), height = Math.round(Math.min(width * 0.6, 460));
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "parameters by bytes per device" });
  const sized = items.map((item) => ({ item, size: kindOf(item).held * item.count }))
    .filter((one) => one.size > 0).slice(0, DRAWN);
  for (const one of squarify(sized, 0, 0, width, height)) {
    if (one.width < 0.5 || one.height < 0.5) continue;
    const { item } = one, kind = kindOf(item), layout = layoutOf(kind);
    const label = `${item.label}: ${number(one.size)} bytes per device, ${layout}`;
    const cell = make("g", { role: "button", tabindex: "0", "aria-label": label, "aria-pressed": String(item === state.chosen) });
    cell.append(make("title", {}, label), make("rect", {
      x: one.x + 0.5, y: one.y + 0.5, width: Math.max(one.width - 1, 0.5), height: Math.max(one.height - 1, 0.5),
      rx: 2, fill: colour(layout), "fill-opacity": 0.45 }));
    const letters = Math.floor((one.width - 8) / 6.7), short = item.label.split("/").slice(-2).join("/");
    if (letters > 5 && one.height > 16)
      cell.append(make("text", { x: one.x + 5, y: one.y + 14 }, short.length > letters ? short.slice(-letters) : short));
    onPress(cell, () => choose(item));
    svg.append(cell);
  }
  $("map").replaceChildren(svg);
  const seen = [...new Set(items.map((item) => layoutOf(kindOf(item))))];
  $("legend").replaceChildren(...seen.map((layout) => {
    const key = make("span", { class: "key" }), mark = make("i");
    mark.style.background = colour(layout);
    key.append(mark, layout === "replicated" ? "replicated" : `split over ${layout}`);
    return key;
  }));
}

function drawList(items) {
  const rows = items.slice(0, LISTED).map((item) => {
    const kind = kindOf(item), row = make("tr", { "aria-selected": String(item === state.chosen) });
    const button = make("button", { type: "button" }, (item.count > 1 ? `${number(item.count)} × ` : "") + (item.label || "(the array)"));
    button.addEventListener("click", () => choose(item));
    const first = make("td");
    first.append(button);
    row.append(first, make("td", {}, kind.shape), make("td", {}, kind.spec + (kind.mark ? ` ${kind.mark}` : "")),
      make("td", { class: "n" }, number(kind.held * item.count)));
    return row;
  });
  $("list").tBodies[0].replaceChildren(...rows);
  $("more").textContent = items.length > LISTED ? `and ${number(items.length - LISTED)} more: narrow the filter` : "";
  $("found").textContent = `${number(items.length)} of ${number(plan().items.length)}`;
}

// The tile that the device at a position of the mesh holds, as a part per dimension.
function partsOf(kind, device) {
  const at = {};
  for (const [axis, size] of [...plan().mesh].reverse()) { at[axis] = device % size; device = Math.floor(device / size); }
  const sizes = Object.fromEntries(plan().mesh);
  return kind.axes.map((axes) => axes.reduce((part, axis) => part * sizes[axis] + at[axis], 0));
}

function sliceOf(kind, parts) {
  return parts.map((part, dim) => kind.axes[dim].length ? `${part * kind.shard[dim]}:${(part + 1) * kind.shard[dim]}` : ":").join(", ");
}

function drawMesh(kind) {
  const mesh = plan().mesh, devices = plan().devices, sizes = Object.fromEntries(mesh);
  const columns = mesh[mesh.length - 1][1], rows = devices / columns;
  const cell = Math.max(2, Math.min(48, Math.floor(Math.max($("detail").clientWidth - 30, 250) / columns)));
  const svg = make("svg", { viewBox: `0 0 ${columns * cell} ${rows * cell}`, role: "img", "aria-label": "the mesh, coloured by tile" });
  svg.style.maxWidth = `${columns * cell}px`;
  const counts = kind.axes.map((axes) => axes.reduce((ways, axis) => ways * sizes[axis], 1)), lines = [];
  for (let device = 0; device < devices; device++) {
    const parts = partsOf(kind, device), slice = sliceOf(kind, parts);
    const tile = parts.reduce((sum, part, dim) => sum * counts[dim] + part, 0);
    const x = device % columns * cell, y = Math.floor(device / columns) * cell;
    const rect = make("rect", { x, y, width: cell - (cell > 6 ? 1 : 0), height: cell - (cell > 6 ? 1 : 0),
      fill: `hsl(${(tile * 137.5) % 360} 65% 50%)`, "fill-opacity": 0.45, "data-tile": tile });
    if (devices <= 1024) rect.append(make("title", {}, `device ${device} holds [${slice}]`));
    svg.append(rect);
    if (cell >= 26) svg.append(make("text", { x: x + 4, y: y + cell / 2 + 4 }, String(device)));
    if (lines.length < 256) lines.push(`device ${device}: [${slice}]`);
  }
  if (devices > lines.length) lines.push(`and ${number(devices - lines.length)} more devices`);
  const copies = devices / kind.ways;
  $("mesh").querySelector("figcaption").textContent =
    `${number(kind.ways)} ${kind.ways === 1 ? "tile" : "tiles"} of (${kind.shard.join(", ")}), each on ${number(copies)} ` +
    `${copies === 1 ? "device" : "devices"}; down: ${mesh.slice(0, -1).map(([a, n]) => `${a}=${n}`).join(", ") || "-"}, across: ${mesh[mesh.length - 1].join("=")}`;
  $("mesh").querySelector("div").replaceChildren(svg);
  $("holders").querySelector("pre").textContent = lines.join("\n");
  $("mesh").hidden = $("holders").hidden = false;
}

function choose(item) {
  state.chosen = item;
  const kind = kindOf(item), facts = {
    shape: kind.shape, dtype: kind.dtype, names: kind.names, spec: kind.spec, "one shard": `(${kind.shard.join(", ")})`,
    bytes: number(kind.nbytes * item.count), "bytes per device": number(kind.held * item.count), ways: number(kind.ways) };
  if (item.count > 1) facts.arrays = number(item.count);
  if (kind.mark) facts.mark = kind.mark;
  $("h-detail").textContent = item.label || "(the array)";
  $("facts").replaceChildren(...Object.entries(facts).flatMap(([key, value]) => [make("dt", {}, key), make("dd", {}, value)]));
  $("h-why").hidden = false;
  $("why").replaceChildren(...kind.why.map((text) => make("li", {}, text)));
  drawMesh(kind);
  draw();
  if (window.innerWidth < 900) $("detail").scrollIntoView();
}

function draw() {
  const focused = document.activeElement?.getAttribute?.("aria-label");
  const items = matching();
  drawMap(items);
  drawList(items);
  if (focused) [...document.querySelectorAll("#map g")].find((g) => g.getAttribute("aria-label") === focused)?.focus();
}

function table({ header, right, rows, title, notes }) {
  const box = make("div", { class: "scroll" }), found = make("table"), head = make("tr");
  header.forEach((text, n) => head.append(make("th", right.includes(n) ? { class: "n" } : {}, text)));
  found.append(head, ...rows.map((cells) => {
    const row = make("tr");
    cells.forEach((text, n) => row.append(make("td", right.includes(n) ? { class: "n" } : {}, text)));
    return row;
  }));
  box.append(found);
  return [make("p", {}, title), ...(rows.length ? [box] : []), ...notes.map((text) => make("p", {}, text))];
}

function show() {
  state.chosen = null;
  $("summary").textContent = plan().summary;
  $("waste").replaceChildren(...plan().waste.flatMap(table));
  $("costs")?.replaceChildren(...plan().costs.flatMap(table));
  $("lint").replaceChildren(...plan().findings.map((one) => {
    const item = make("li", { class: one.severity });
    item.append(make("b", {}, `${one.severity} ${one.code}: `), one.message, make("small", {}, `fix: ${one.fix}`));
    return item;
  }));
  if (!plan().findings.length) $("lint").replaceChildren(make("li", {}, "none"));
  $("h-detail").textContent = "Choose a parameter";
  for (const id of ["facts", "why"]) $(id).replaceChildren();
  for (const id of ["h-why", "mesh", "holders"]) $(id).hidden = true;
  draw();
}

$("filter").addEventListener("input", (event) => { state.filter = event.target.value; draw(); });
$("plan")?.addEventListener("change", (event) => { state.plan = Number(event.target.value); show(); });
let waiting, drawnAt = window.innerWidth;
window.addEventListener("resize", () => {  // on a phone a scroll is a resize too: of the height
  clearTimeout(waiting);
  waiting = setTimeout(() => { if (window.innerWidth !== drawnAt) { drawnAt = window.innerWidth; draw(); } }, 100);
});
show();
})();
