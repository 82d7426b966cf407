// The curves of a run: parsed from the server's bytes, updated, smoothed, placed on other axes.
import { get, read, useState, useEffect, useRef, useThrottled, useLive } from "./lib.js";

export const POINTS = 400;
export const WHOLE = [0, 2 ** 52];
/** x-axis -> the metric whose running sum it is. */
const CLOCKS = { time: "timing_s/step", tokens: "perf/total_num_tokens" };
const APPENDED = 40;

/**
 * @typedef {{first: number[], last: number[], time?: number[], tokens?: number[]}} Axis
 * @typedef {{mean: (number | null)[], low: (number | null)[], high: (number | null)[]}} Column
 * @typedef {{axis: Axis, per: number, columns: Map<string, Column>}} Table
 */

/** Curves of a run: {step, train, eval, evaluations: their number, resumed: number of resumes}. */
export async function getCurves(id, keys, points = POINTS, [from, to] = WHOLE) {
  const query = new URLSearchParams({ keys: keys.join("\n"), points: String(points), from: String(Math.floor(from)), to: String(Math.ceil(to)) });
  const response = await fetch(`/api/runs/${id}/metrics?${query}`);
  if (!response.ok) await read(response);
  const buffer = await response.arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  let place = 4 + length;
  const take = (count) => {
    const found = Array.from(new Float32Array(buffer, place, count), (value) => (Number.isNaN(value) ? null : value));
    place += 4 * count;
    return found;
  };
  /** @returns {Table} */
  const unpack = ({ count, per, axis, names }) => {
    const given = /** @type {Axis} */ (Object.fromEntries(axis.map((name) => [name, take(count)])));
    const columns = new Map();
    for (const name of names) {
      const mean = take(count);
      columns.set(name, per > 1 ? { mean, low: take(count), high: take(count) } : { mean, low: mean, high: mean });
    }
    return { axis: given, per, columns };
  };
  const { step, evaluations, resumed } = header;
  return { step, train: unpack(header.train), eval: unpack(header.eval), evaluations, resumed };
}

/** Append the rows of further steps to a table. */
function extended(table, steps, given) {
  const axis = { ...table.axis, first: [...table.axis.first, ...steps], last: [...table.axis.last, ...steps] };
  for (const [name, metric] of Object.entries(CLOCKS)) {
    if (!table.axis[name]) continue;
    let sum = table.axis[name][table.axis[name].length - 1] ?? 0;
    axis[name] = [...table.axis[name], ...steps.map((_, i) => (sum += given[metric]?.[i] ?? 0))];
  }
  const columns = new Map();
  for (const [name, column] of table.columns) {
    const added = given[name] || steps.map(() => null);
    const mean = [...column.mean, ...added];
    columns.set(name, table.per > 1 ? { mean, low: [...column.low, ...added], high: [...column.high, ...added] } : { mean, low: mean, high: mean });
  }
  return { ...table, axis, columns };
}

/** [curves, error] of a run, kept up to date. `range`: the zoomed steps. */
export function useCurves(id, names, range, points = POINTS) {
  const [curves, setCurves] = useState(null);
  const [error, setError] = useState(null);
  const own = useRef({ asked: "", busy: false, again: false, appended: 0 });
  const key = names.join("\n");
  const asked = `${id}\n${key}\n${range}\n${points}`;
  const load = async () => {
    try {
      const found = await getCurves(id, names, points, range);
      if (own.current.asked !== asked) return;
      own.current.appended = 0;
      setCurves(found);
      setError(null);
    } catch (failure) {
      setError(failure);
    }
  };
  const tail = async () => {
    if (!curves) return;
    if (own.current.busy) {
      own.current.again = true;
      return;
    }
    own.current.busy = true;
    try {
      const found = await get(`/api/runs/${id}/tail?after=${curves.step}&resumed=${curves.resumed}`);
      const unknown = Object.keys(found.columns).some((name) => names.includes(name) && !curves.train.columns.has(name));
      const many = own.current.appended + found.steps.length > (curves.train.per > 1 ? APPENDED : points);
      if (found.rewritten || unknown || many || range[1] < WHOLE[1]) await load();
      else if (found.steps.length || found.evaluations !== curves.evaluations) {
        const evaluated = found.evaluations === curves.evaluations ? curves.eval : (await getCurves(id, names, points, range)).eval;
        own.current.appended += found.steps.length;
        setCurves({ ...curves, step: found.steps[found.steps.length - 1] ?? curves.step, train: extended(curves.train, found.steps, found.columns), eval: evaluated, evaluations: found.evaluations });
      }
    } catch (failure) {
      setError(failure);
    } finally {
      own.current.busy = false;
      if (own.current.again) soon(); // with the curves as of then
      own.current.again = false;
    }
  };
  useEffect(() => {
    own.current.asked = asked;
    load();
  }, [asked]);
  const soon = useThrottled(tail, 300);
  useLive((name, ids) => {
    if ((name === "changed" && ids.includes(id)) || name === "ready") soon();
  });
  return [curves, error];
}

/** Exponential moving average as in TensorBoard, with bias correction; missing values stay missing. */
export function smoothed(values, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = sum * weight + value;
    total = total * weight + 1;
    return sum / total;
  });
}

/** Linear interpolation in an increasing table; constant beyond its ends. */
export function interpolated(xs, ys, x) {
  let low = 0;
  let high = xs.length - 1;
  if (high < 0) return null;
  if (x >= xs[high]) return ys[high];
  if (x <= xs[0]) return ys[0];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  const span = xs[high] - xs[low];
  return span ? ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / span : ys[high];
}
