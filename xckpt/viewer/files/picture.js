// The picture of a leaf in one plane: shards filled in colour, arrays and chunks as lines over them.

const COLOURS = 8;
const MOST_CELLS = 3000;
const MOST_SHARDS = 4000;
const WIDTH = 640;
const HEIGHT = 420;
const LEAST = 48;
const LARGEST = 96;

let patterns = 0;

/** Pixels for elements down and across: to one scale where that can be seen, else each its own. */
function pixels(rows, columns) {
  const scale = Math.min(WIDTH / columns, HEIGHT / rows, LARGEST);
  const width = Math.max(columns * scale, LEAST);
  const height = Math.max(rows * scale, LEAST);
  return { width, height, even: columns * scale >= LEAST && rows * scale >= LEAST };
}

/** A rectangle of elements with a class; what it is stands in its title. */
function rectangle(place, kind, title = "", more = {}) {
  const attributes = { ...place, class: kind, ...more };
  return draw("rect", attributes, title ? [draw("title", {}, title)] : []);
}

/** A fill for shards that several devices hold: the colour, hatched. */
function hatched(defs, colour, scale) {
  const id = `hatch-${(patterns += 1)}`;
  const transform = `scale(${1 / scale.x} ${1 / scale.y}) rotate(45)`;
  defs.append(
    draw("pattern", { id, width: 9, height: 9, patternUnits: "userSpaceOnUse", patternTransform: transform },
      draw("rect", { width: 9, height: 9, class: `c${colour}` }),
      draw("line", { x1: 0, y1: 0, x2: 0, y2: 9, class: "hatch" })));
  return `url(#${id})`;
}

/** "[0, 4) x [8, 16)" */
function boxText(box) {
  return box.offset.map((low, d) => `[${low}, ${low + box.size[d]})`).join(" x ") || "the scalar";
}

/** Devices in words, at most eight. */
function devicesText(devices) {
  const more = devices.length > 8 ? ` and ${devices.length - 8} more` : "";
  return `${devices.length === 1 ? "device" : "devices"} ${devices.slice(0, 8).join(", ")}${more}`;
}

/** A colour for each set of holders, so that neighbours of a mesh differ. */
function colourOf(shard) {
  return shard.devices[0] % COLOURS;
}

/** The shards as rectangles, with the devices' numbers where there is room. */
function shardLayer(shards, plane, scale, defs) {
  const rectangles = draw("g", { class: "shards" });
  const labels = [];
  const fills = new Map();
  for (const shard of shards.slice(0, MOST_SHARDS)) {
    const place = plane.of(shard.box);
    const colour = colourOf(shard);
    const many = shard.devices.length > 1;
    if (many && !fills.has(colour)) fills.set(colour, hatched(defs, colour, scale));
    const title = `${boxText(shard.box)}: ${devicesText(shard.devices)}`;
    const more = { "data-devices": shard.devices.join(" "), fill: many ? fills.get(colour) : null };
    rectangles.append(rectangle(place, many ? "shard" : `shard c${colour}`, title, more));
    const text = many ? `${shard.devices[0]} +${shard.devices.length - 1}` : `${shard.devices[0]}`;
    const room = { x: place.width * scale.x, y: place.height * scale.y };
    if (room.x > 8 * text.length + 6 && room.y > 16)
      labels.push({ x: (place.x + place.width / 2) * scale.x, y: (place.y + place.height / 2) * scale.y, text });
  }
  return { rectangles, labels };
}

/** Chunks, zarr shards and arrays; chunks too many to tell apart become a note. */
function storedLayer(kind, plane) {
  const group = draw("g", { class: "stored" });
  const outlines = draw("g", { class: "arrays" });
  const notes = kind.arrays.length ? [] : ["too many pieces to draw"];
  let drawn = 0;
  let left = 0;
  for (const [number, array] of kind.arrays.entries()) {
    for (const [cell, name] of [[array.chunk, "chunk"], [array.shard, "unit"]]) {
      if (!cell) continue;
      const cells = cellsIn(plane, array, cell);
      if (!cells.outer) continue;
      if (drawn + cells.count > MOST_CELLS) left += cells.count;
      else {
        drawn += cells.count;
        group.append(...cells.rectangles().map((place) => rectangle(place, name)));
      }
    }
    const outer = plane.of({ offset: array.offset, size: array.shape });
    if (outer) outlines.append(rectangle(outer, "array", "", { "data-array": number }));
  }
  if (left) notes.push(`${counted(left, "chunk")} in this plane too small to draw`);
  return { group, outlines, notes };
}

/** The picture: {svg, notes, shards}. `targets` are the shards of a reader, drawn over it. */
function pictureOf(kind, cuts, mesh, plane, label, targets = null) {
  const rows = plane.size(plane.down);
  const columns = plane.size(plane.across);
  const { width, height, even } = pixels(rows, columns);
  const scale = { x: width / columns, y: height / rows };
  const left = plane.down === null ? 2 : 10 + 7 * String(rows).length;
  const defs = draw("defs");
  const inner = draw("svg", {
    class: "elements", x: left, y: 18, width, height, viewBox: `0 0 ${columns} ${rows}`, preserveAspectRatio: "none", overflow: "visible",
  }, defs, rectangle({ x: 0, y: 0, width: columns, height: rows }, "empty"));
  const shards = cuts && mesh ? shardsIn(plane, cuts, mesh) : [];
  const { rectangles, labels } = shardLayer(shards, plane, scale, defs);
  const stored = storedLayer(kind, plane);
  inner.append(rectangles, stored.group, stored.outlines);
  if (targets) inner.append(targetLayer(targets, plane));
  const texts = labels.map(({ x, y, text }) => draw("text", { x: x + left, y: y + 18, class: "on" }, text));
  const size = { width: width + left + 3, height: height + 22 };
  const sides = [[left, 12, "start", 0], [width + left, 12, "end", columns]];
  if (plane.down !== null) sides.push([left - 5, 30, "end", 0], [left - 5, height + 17, "end", rows]);
  const ends = sides.map(([x, y, anchor, text]) => draw("text", { x, y, "text-anchor": anchor }, text));
  const svg = draw("svg", { class: "picture", role: "img", "aria-label": label, viewBox: `0 0 ${size.width} ${size.height}`, ...size },
    ends, inner, texts);
  const notes = stored.notes;
  if (!even && plane.down !== null) notes.unshift("each axis has its own scale");
  if (shards.length > MOST_SHARDS) notes.push(`${numberText(MOST_SHARDS)} of ${counted(shards.length, "shard")} drawn`);
  return { svg, inner, notes, shards };
}

/** What the devices of a reader want, as outlines. */
function targetLayer(targets, plane) {
  const group = draw("g", { class: "targets" });
  for (const shard of shardsIn(plane, targets.cuts, targets.mesh).slice(0, MOST_SHARDS))
    group.append(rectangle(plane.of(shard.box), "target", `${boxText(shard.box)}: wanted by ${devicesText(shard.devices)}`));
  return group;
}
