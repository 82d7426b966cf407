// Shared by all pages: rendering, requests, live events, numbers and texts.
import { html, render, h, useState, useEffect, useLayoutEffect, useMemo, useRef, useCallback } from "./vendor/htm-preact.js";
import { t } from "./i18n.js";

export { html, render, h, useState, useEffect, useLayoutEffect, useMemo, useRef, useCallback };

/** Fetch JSON from the server. Throws an Error with the server's message. */
export async function get(path) {
  return read(await fetch(path, { headers: { accept: "application/json" } }));
}

export async function post(path, body) {
  const headers = { "content-type": "application/json", "x-atomrl": "1" };
  return read(await fetch(path, { method: "POST", headers, body: JSON.stringify(body) }));
}

export async function read(response) {
  if (response.ok) return response.json();
  const text = await response.text();
  let said = text.trim();
  try {
    said = JSON.parse(text).detail || said;
  } catch {
    // not JSON: plain text
  }
  throw Object.assign(new Error(said || `HTTP ${response.status}`), { status: response.status });
}

// One event stream per tab, closed while the tab is hidden, because browsers allow six connections to a server.
const listeners = new Set();
let source = null;
/** State of the connection: "" (connected), "lost" (no answer), "started_anew" (the server was restarted and has another token). */
export const connection = { trouble: "" };

function tell(name, ids) {
  for (const listener of [...listeners]) listener(name, ids);
}

function connect() {
  if (document.hidden || source) return;
  source = new EventSource("/api/events");
  for (const name of ["ready", "changed", "gone"]) {
    source.addEventListener(name, (event) => {
      connection.trouble = "";
      tell(name, JSON.parse(event.data));
    });
  }
  source.addEventListener("error", () => {
    connection.trouble = connection.trouble || "lost";
    tell("lost", []);
    if (source && source.readyState === EventSource.CLOSED) {
      source = null;
      setTimeout(connect, 2000);
      askWhy();
    }
  });
}

/** Find out why the stream was refused, which its error does not say: a restarted server has another token. */
async function askWhy() {
  const answer = await fetch("/static/icon.svg", { method: "HEAD" }).catch(() => null);
  if (!connection.trouble) return;
  connection.trouble = answer && answer.status === 401 ? "started_anew" : "lost";
  tell("lost", []);
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden && source) {
    source.close();
    source = null;
  } else connect();
});

/** Call `listener(name, ids)` on "changed", "gone", "ready" (reconnected: anything may have changed), "lost". */
export function useLive(listener) {
  const newest = useRef(listener);
  newest.current = listener;
  useEffect(() => {
    const call = (name, ids) => newest.current(name, ids);
    listeners.add(call);
    connect();
    return () => listeners.delete(call);
  }, []);
}

/** [value, error, reload] of a path; fetched again when one of the runs in `ids` changes, at most once per interval of so
 * many milliseconds. */
export function useGet(path, ids = [], every = 0) {
  const [found, setFound] = useState({ path: null, value: null, error: null });
  const state = useRef({ current: path, busy: false, again: false });
  state.current.current = path;
  const load = useCallback(async () => {
    const own = state.current;
    if (own.busy) {
      own.again = true;
      return;
    }
    own.busy = true;
    do {
      own.again = false;
      const asked = own.current;
      if (asked === null) break;
      try {
        const value = await get(asked);
        if (asked === own.current) setFound({ path: asked, value, error: null });
      } catch (error) {
        if (asked === own.current) setFound((old) => ({ path: asked, value: old.path === asked ? old.value : null, error }));
      }
      if (asked !== own.current) own.again = true;
    } while (own.again);
    own.busy = false;
  }, []);
  const soon = useThrottled(load, every);
  useEffect(() => {
    load();
  }, [path]);
  useLive((name, changed) => {
    if (name === "ready" || ((name === "changed" || name === "gone") && changed.some((id) => ids.includes(id)))) soon();
  });
  return [found.value, found.error, load, found.path === path];
}

/** Throttle a function: at most one call per interval, and always the last one. */
export function useThrottled(call, ms) {
  const state = useRef({ timer: 0, last: 0 });
  const newest = useRef(call);
  newest.current = call;
  return useCallback(() => {
    const own = state.current;
    clearTimeout(own.timer);
    const wait = Math.max(0, own.last + ms - performance.now());
    own.timer = setTimeout(() => {
      own.last = performance.now();
      newest.current();
    }, wait);
  }, []);
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (Number.isInteger(value) && size < 1e6) return String(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(digits - 1).replace("e+", "e");
  return String(Number(value.toPrecision(size >= 100 ? Math.max(digits, 4) : digits)));
}

/** Format a count: 1.23M, in Chinese 123万. */
export function count(value) {
  return new Intl.NumberFormat(document.documentElement.lang || "en", { notation: "compact", maximumSignificantDigits: 3 }).format(value);
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const s = Math.round(seconds);
  if (s < 60) return t("s", { n: s });
  if (s < 3600) return `${t("min", { n: Math.floor(s / 60) })} ${t("s", { n: String(s % 60).padStart(2, "0") })}`;
  const hours = Math.floor(s / 3600);
  return hours < 48 ? `${t("h", { n: hours })} ${t("min", { n: Math.floor((s % 3600) / 60) })}` : t("d", { n: Math.round(hours / 24) });
}

/** How long ago a time was; updates itself. */
export function Ago({ time }) {
  const [, setNow] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => document.hidden || setNow(Date.now()), 10_000);
    return () => clearInterval(timer);
  }, []);
  return ago(time);
}

function ago(time) {
  if (!time) return "–";
  const s = Math.max(0, Date.now() / 1000 - time);
  const said = s < 3600 ? (s < 60 ? duration(s) : t("min", { n: Math.floor(s / 60) })) : s < 172800 ? t("h", { n: Math.floor(s / 3600) }) : duration(s);
  return t("ago", { time: said });
}

// Control characters, and those that change the writing direction.
const ODD = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/gu;

/** Text for an attribute or an image: a placeholder replaces each invisible character. */
export const plainText = (text) => String(text).replace(ODD, "\ufffd");

/** Untrusted text of a model, data or config: invisible characters are shown by name, and have no effect. */
export function visible(text) {
  const parts = [];
  let start = 0;
  for (const match of String(text).matchAll(ODD)) {
    parts.push(text.slice(start, match.index));
    const code = match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    parts.push(html`<span class="odd">U+${code}</span>`);
    start = match.index + match[0].length;
  }
  parts.push(String(text).slice(start));
  return parts;
}

/** Background from blue (negative) to orange (positive). The number is always beside it, for readers who cannot tell colors. */
export function tint(value, scale = 1) {
  if (value === null || value === undefined || !scale) return "tint";
  const level = Math.min(4, Math.ceil((4 * Math.abs(value)) / scale - 0.001));
  return `tint ${level <= 0 ? "" : value > 0 ? `plus${level}` : `minus${level}`}`;
}

export const MARKS = { running: "●", finished: "✓", stopped: "❙❙", failed: "✕" };

export function Status({ status }) {
  return html`<span class=${`status ${status}`}><span aria-hidden="true">${MARKS[status]}</span> <span class="word">${t(status)}</span></span>`;
}

export function Failure({ error }) {
  if (!error) return null;
  const said = error.status === 404 ? t("gone") : error.status === 401 ? t("unauthorized") : error.message;
  return html`<p class="failure" role="alert">${visible(said)}</p>`;
}

export function Loading() {
  return html`<p class="loading" role="status">${t("loading")}</p>`;
}

/** A column head that sorts its table; `direction` if the table is sorted by it.
 * @param {{name: string, title?: string, kind?: string, direction: string | null, sort: () => void}} props */
export function SortedBy({ name, title = "", kind = "", direction, sort }) {
  return html`<th scope="col" class=${kind} aria-sort=${direction || undefined}><button class="sort" title=${title} onClick=${sort}>${t(name)}<span aria-hidden="true">${direction === "descending" ? " ▼" : direction ? " ▲" : ""}</span></button></th>`;
}

/** The same for narrow screens, where tables have no head. @param {{names: string[], column: string, sort: (name: string) => void}} props */
export function SortBy({ names, column, sort }) {
  return html`<label class="narrow">${t("sort")} <select value=${column} onChange=${(event) => sort(event.target.value)}>${names.map((name) => html`<option value=${name}>${t(name)}</option>`)}</select></label>`;
}

/** Glossary of a page. @param {{terms: [any, string][]}} props */
export function Explain({ terms }) {
  return html`<details class="explain"><summary>${t("what_it_means")}</summary><dl class="facts">${terms.map(([name, said]) => html`<div><dt>${name}</dt><dd>${said}</dd></div>`)}</dl></details>`;
}

/** A sparkline. */
export function Spark({ points }) {
  const [x, y] = points;
  if (x.length < 2) return null;
  const low = Math.min(...y);
  const span = Math.max(...y) - low || 1;
  const width = x[x.length - 1] - x[0] || 1;
  const path = x.map((step, i) => `${((94 * (step - x[0])) / width + 3).toFixed(1)},${(21 - (18 * (y[i] - low)) / span).toFixed(1)}`);
  return html`<svg class="spark" viewBox="0 0 100 24" aria-hidden="true"><polyline points=${path.join(" ")} /></svg>`;
}

/** Decode a part of an address; unchanged if it is malformed (a stray %). */
function plain(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** The current location: path and query behind the #. */
export function place() {
  const [path, query] = location.hash.slice(1).split("?");
  return { path: (path || "/").split("/").filter(Boolean).map(plain), query: new URLSearchParams(query || "") };
}

export function link(parts, query) {
  const text = query && query.toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

/** Keyboard shortcuts, outside of fields: {j: () => ...}. */
export function useKeys(keys) {
  const newest = useRef(keys);
  newest.current = keys;
  useEffect(() => {
    const pressed = (event) => {
      const field = event.target.closest && event.target.closest("input, textarea, select");
      if (field || event.ctrlKey || event.metaKey || event.altKey) return;
      const call = newest.current[event.key];
      if (call) {
        event.preventDefault();
        call();
      }
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}

/** State that is stored in this browser. */
export function useKept(name, initial) {
  const [value, setValue] = useState(() => {
    try {
      return localStorage.getItem(`atomrl.${name}`) || initial;
    } catch {
      return initial;
    }
  });
  const keep = (next) => {
    setValue(next);
    try {
      localStorage.setItem(`atomrl.${name}`, next);
    } catch {
      // storage is disabled
    }
  };
  return [value, keep];
}
