// Boxes of a tensor: the shards that its cuts make, the chunks of its arrays, and the plane that is
// drawn of them. A box is {offset, size}: elements in each dimension.

/** How a tensor is looked at: the dimensions down and across, and where the others are cut open. */
class Plane {
  constructor(shape, down, across, at) {
    this.shape = shape;
    this.down = down;
    this.across = across;
    this.at = at;
  }

  size(dimension) {
    return dimension === null ? 1 : this.shape[dimension];
  }

  /** The rectangle of a box in the plane, or null if it does not lie there. */
  of(box) {
    for (let d = 0; d < this.shape.length; d += 1) {
      const stop = box.offset[d] + box.size[d];
      if (box.size[d] <= 0) return null;
      if (d === this.down || d === this.across) continue;
      if (this.at[d] < box.offset[d] || this.at[d] >= stop) return null;
    }
    const along = (d) => (d === null ? [0, 1] : [box.offset[d], box.size[d]]);
    const [y, height] = along(this.down);
    const [x, width] = along(this.across);
    return { x, y, width, height };
  }

  /** Whether the part [low, high) of a dimension is in the plane. */
  holds(d, low, high) {
    return d === this.down || d === this.across || (low <= this.at[d] && this.at[d] < high);
  }
}

/** The dimensions to look at first: the two slowest that are cut, or the last ones. */
function firstPlane(kind, cuts) {
  const shape = kind.shape;
  const isCut = (d) =>
    kind.arrays.some((array) => Math.min(array.shape[d], array.chunk[d]) < shape[d]) ||
    (cuts !== null && cuts[d].intervals.length > 1);
  const ranked = shape.map((_, d) => d).sort((a, b) => isCut(b) - isCut(a) || (shape[a] === 1) - (shape[b] === 1) || a - b);
  const chosen = ranked.slice(0, 2).sort((a, b) => a - b);
  const [down, across] = chosen.length === 2 ? chosen : [null, chosen[0] ?? null];
  return new Plane(shape, down, across, shape.map(() => 0));
}

/** Coordinates of a device of a mesh, the last axis fastest. */
function coordinates(device, mesh) {
  const at = [];
  let rest = device;
  for (const [, size] of mesh.toReversed()) {
    at.unshift(rest % size);
    rest = Math.floor(rest / size);
  }
  return at;
}

/** "device 5 (data=1, model=1)" */
function deviceText(device, mesh) {
  const at = coordinates(device, mesh);
  return `device ${device} (${mesh.map(([name], axis) => `${name}=${at[axis]}`).join(", ")})`;
}

/** Every combination of one entry of each list. */
function combinations(lists) {
  return lists.reduce((made, list) => made.flatMap((front) => list.map((each) => [...front, each])), [[]]);
}

/**
 * The distinct shards that have a part in the plane, each with the devices that hold it.
 *
 * Cuts of one dimension do not know those of another, so only the plane's own intervals are kept.
 */
function shardsIn(plane, cuts, mesh) {
  const devices = mesh.reduce((count, [, size]) => count * size, 1);
  const shards = new Map();
  for (let device = 0; device < devices; device += 1) {
    const at = coordinates(device, mesh);
    const held = cuts.map((cut, d) => {
      let number = 0;
      for (const axis of cut.axes) number = number * mesh[axis][1] + at[axis];
      return cut.intervals[number].filter(([low, high]) => plane.holds(d, low, high));
    });
    if (held.some((rows) => rows.length === 0)) continue;
    for (const rows of combinations(held)) {
      const key = rows.join(";");
      const shard = shards.get(key);
      if (shard) shard.devices.push(device);
      else {
        const box = { offset: rows.map(([low]) => low), size: rows.map(([low, high]) => high - low) };
        shards.set(key, { box, devices: [device] });
      }
    }
  }
  return [...shards.values()];
}

/** How many steps a size takes. */
const steps = (size, step) => Math.ceil(size / step);

/** The chunks of an array (or its zarr shards) that have a part in the plane, as rectangles. */
function cellsIn(plane, array, cell) {
  const box = { offset: array.offset, size: array.shape };
  const outer = plane.of(box);
  if (!outer) return { outer: null, count: 0, rectangles: () => [] };
  const along = (d, size) => (d === null ? [size, 1] : [Math.min(cell[d], array.shape[d]), steps(array.shape[d], cell[d])]);
  const [height, rows] = along(plane.down, 1);
  const [width, columns] = along(plane.across, 1);
  const rectangles = () => {
    const made = [];
    for (let row = 0; row < rows; row += 1)
      for (let column = 0; column < columns; column += 1)
        made.push({
          x: outer.x + column * width,
          y: outer.y + row * height,
          width: Math.min(width, outer.width - column * width),
          height: Math.min(height, outer.height - row * height),
        });
    return made;
  };
  return { outer, count: rows * columns, rows, columns, width, height, rectangles };
}
