// Where the diagram's boxes and lines are. Where there is room for the boxes, the flow goes from left to right, else, as
// on a phone, from top to bottom.
//
// Stages stand in columns by their longest way from the input. A line to the next column goes straight. One that skips
// columns takes a lane of its own beside the boxes: input from the client below them (narrow: to the left), everything
// else above (to the right). Each line has a label with its rate and its ring's gauge.

const CLIENT = "client";
const NARROWEST = 145; // the least width of a box in a horizontal flow: its buttons fit
const WIDEST = 230; // and the most
const WIDEST_BELOW = 460; // the most width of a box in a vertical flow
const END = 44; // the width of the client's boxes
const REPLICA = 40;
const CHAOS = 30;
const HEADER = 34;
const LANE = 24;
const GAP = 18;

function columnsOf(stages) {
  const depth = Object.create(null); // a stage may have the name of an object's property
  const visit = (name) => {
    depth[name] ??= 1 + Math.max(0, ...stages[name].inputs.map(visit));
    return depth[name];
  };
  Object.keys(stages).forEach(visit);
  const columns = [];
  for (const name of Object.keys(stages)) (columns[depth[name] - 1] ||= []).push(name);
  return { columns, depth };
}

function edgesOf(stages) {
  const edges = [];
  for (const [name, stage] of Object.entries(stages)) {
    if (stage.accepts.length) edges.push({ from: CLIENT, to: name });
    for (const source of stage.inputs) edges.push({ from: source, to: name });
    if (stage.emits) edges.push({ from: name, to: CLIENT });
  }
  return edges.map((edge) => ({ ...edge, name: `${edge.from}>${edge.to}` }));
}

export function layout(stages, width, hasChaos) {
  const { columns, depth } = columnsOf(stages);
  const edges = edgesOf(stages);
  const height = (name) => HEADER + Math.max(1, Object.keys(stages[name].replicas).length) * (REPLICA + (hasChaos ? CHAOS : 0));
  const fits = widths(columns.length, width).box >= NARROWEST;
  return (fits ? horizontal : vertical)({ columns, depth, edges, height, width });
}

// Returns the widths of a horizontal flow: of a box, and of the gap between two columns.
function widths(columns, width) {
  const gap = Math.max(56, Math.min(70, width / (columns * 4.5)));
  return { gap, box: Math.min(WIDEST, (width - 2 * END - (columns + 1) * gap) / columns) };
}

// Returns the lines that skip something, apart by the side on which they pass it.
function sides(edges, skips) {
  const skipping = edges.filter(skips);
  return {
    below: skipping.filter((edge) => edge.from === CLIENT),
    above: skipping.filter((edge) => edge.from !== CLIENT),
  };
}

function horizontal({ columns, depth, edges, height, width }) {
  const { below, above } = sides(edges, ({ from, to }) => (depth[to] ?? columns.length + 1) - (depth[from] ?? 0) > 1);
  const client = END;
  const { gap, box: boxWidth } = widths(columns.length, width);
  const used = 2 * client + columns.length * boxWidth + (columns.length + 1) * gap;
  const left = (width - used) / 2;
  const top = above.length * LANE + 10;
  const rows = columns.map((names) => names.reduce((sum, name) => sum + height(name) + GAP, -GAP));
  const tallest = Math.max(...rows);
  const middle = top + tallest / 2;
  const boxes = {};
  columns.forEach((names, column) => {
    let y = middle - rows[column] / 2;
    for (const name of names) {
      const x = left + client + gap + column * (boxWidth + gap);
      boxes[name] = { x, y, w: boxWidth, h: height(name) };
      y += height(name) + GAP;
    }
  });
  const start = { x: left, y: middle - 17, w: client, h: 34 };
  const end = { x: left + used - client, y: middle - 17, w: client, h: 34 };
  const at = (name, isEnd) => (name === CLIENT ? (isEnd ? end : start) : boxes[name]);
  const drawn = edges.map((edge) => {
    const [a, b] = [at(edge.from, false), at(edge.to, true)];
    const lane = below.indexOf(edge) >= 0 ? top + tallest + 14 + below.indexOf(edge) * LANE
      : above.indexOf(edge) >= 0 ? top - 12 - above.indexOf(edge) * LANE : null;
    if (lane === null) {
      const [x1, y1, x2, y2] = [a.x + a.w, a.y + a.h / 2, b.x - 2, b.y + b.h / 2];
      const half = (x2 - x1) / 2;
      return { ...edge, path: `M${x1} ${y1}C${x1 + half} ${y1} ${x2 - half} ${y2} ${x2} ${y2}`,
        label: { x: (x1 + x2) / 2, y: (y1 + y2) / 2 - 12 } };
    }
    const isBelow = lane > middle;
    const x1 = a.x + a.w * (edge.from === CLIENT ? 0.5 : 0.62);
    const x2 = b.x + b.w * (edge.to === CLIENT ? 0.5 : 0.38);
    const y1 = isBelow ? a.y + a.h : a.y;
    const y2 = isBelow ? b.y + b.h + 2 : b.y - 2;
    const r = 10;
    const turn = isBelow ? -r : r;
    return { ...edge, path: `M${x1} ${y1}V${lane + turn}Q${x1} ${lane} ${x1 + r} ${lane}H${x2 - r}Q${x2} ${lane} ${x2} ${lane + turn}V${y2}`,
      label: { x: x2 - Math.min(90, (x2 - x1) / 2), y: lane - 5 } };
  });
  return finish(boxes, drawn, [["in", start], ["out", end]], top + tallest + 14 + below.length * LANE);
}

// Narrow: stages of one column stand below each other, too. So a line goes straight only between neighbours.
function vertical({ columns, edges, height, width }) {
  const order = [CLIENT, ...columns.flat(), CLIENT];
  const { below, above } = sides(edges, ({ from, to }) => !order.some((name, at) => name === from && order[at + 1] === to));
  const lanes = { left: 14 + below.length * LANE, right: 14 + above.length * LANE };
  const spare = Math.max(0, width - lanes.left - lanes.right - WIDEST_BELOW) / 2;
  const margin = { left: lanes.left + spare, right: lanes.right + spare };
  const client = 30;
  const gap = 40;
  const inner = width - margin.left - margin.right;
  const boxes = {};
  let y = client + gap;
  for (const names of columns) {
    for (const name of names) {
      boxes[name] = { x: margin.left, y, w: inner, h: height(name) };
      y += height(name) + gap;
    }
  }
  const start = { x: margin.left, y: 0, w: inner, h: client };
  const end = { x: margin.left, y, w: inner, h: client };
  const at = (name, isEnd) => (name === CLIENT ? (isEnd ? end : start) : boxes[name]);
  const drawn = edges.map((edge) => {
    const [a, b] = [at(edge.from, false), at(edge.to, true)];
    const isLeft = below.includes(edge);
    if (!isLeft && !above.includes(edge)) {
      const x = a.x + a.w / 2;
      return { ...edge, path: `M${x} ${a.y + a.h}V${b.y - 2}`, label: { x: x + 46, y: (a.y + a.h + b.y) / 2 } };
    }
    const lane = isLeft ? spare + 10 + below.indexOf(edge) * LANE : width - spare - 10 - above.indexOf(edge) * LANE;
    const [x1, x2] = isLeft ? [a.x, b.x - 2] : [a.x + a.w, b.x + b.w + 2];
    const [y1, y2] = [a.y + a.h * (isLeft ? 0.5 : 0.7), b.y + b.h * (isLeft ? 0.35 : 0.5)];
    const r = isLeft ? 8 : -8;
    return { ...edge, path: `M${x1} ${y1}H${lane + r}Q${lane} ${y1} ${lane} ${y1 + 8}V${y2 - 8}Q${lane} ${y2} ${lane + r} ${y2}H${x2}`,
      label: { x: lane - 5, y: (y1 + y2) / 2, turn: -90 } };
  });
  return finish(boxes, drawn, [["in", start], ["out", end]], y + client + 4);
}

function finish(boxes, edges, clients, height) {
  const style = ({ x, y, w, h }) => ({ left: `${x}px`, top: `${y}px`, width: `${w}px`, height: `${h}px` });
  for (const box of Object.values(boxes)) box.style = style(box);
  return { boxes, edges, height, clients: clients.map(([text, box]) => ({ text, style: style(box) })) };
}
