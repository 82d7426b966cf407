// The tokens of a completion, colored by a recorded value, and how each value enters the loss.
import { html, h, useState, useEffect, useMemo, useRef, useGet, number, link, tint, Failure, visible } from "./lib.js";
import { t } from "./i18n.js";

/** Values to color by; those that affect the update come first. */
const COLOURS = ["ratio", "advantage", "logprob", "entropy", "gap", "reference", "share", "value"];
/** The values of a token, in the order of computation. */
const NUMBERS = ["logprob", "old_logprob", "rollout_logprob", "ref_logprob", "ratio", "advantage", "value", "entropy", "gap", "reference", "loss", "share", "gradient"];

/** Value -> the line of the loss that it enters. */
const LINES = { logprob: "ratio", old_logprob: "ratio", rollout_logprob: "correction", ref_logprob: "kl", reference: "kl", ratio: "ratio", advantage: "advantage", value: "critic", entropy: "entropy", loss: "loss", share: "loss", gradient: "gradient" };

/** Distance of a value from its neutral value: 1 for a ratio, else 0. */
const fromNothing = (name, value) => (value === null || value === undefined ? null : name === "ratio" ? value - 1 : value);

export function Tokens({ run, step, split, place, text }) {
  const path = `/api/runs/${run.id}/rollouts/${step}/${split}/${place}/tokens`;
  const [found, error] = useGet(path, []);
  const [wanted, setWanted] = useState("");
  const [at, setAt] = useState(null);
  const numbers = found && found.numbers;
  const names = numbers ? COLOURS.filter((name) => name in numbers.columns) : [];
  const alike = names.filter((name) => name in numbers.same);
  const name = names.includes(wanted) ? wanted : names.find((one) => !alike.includes(one)) || names[0];
  const masked = useMemo(() => new Set(numbers ? numbers.masked : []), [found]);
  const clipped = useMemo(() => new Set(numbers ? numbers.clipped : []), [found]);
  // Build the spans once; selecting a token changes only its class.
  const spans = useMemo(() => found && found.ids.map((id, i) => {
    const value = name && !masked.has(i) ? fromNothing(name, numbers.columns[name][i]) : null;
    const marks = `${value === null ? "" : tint(value, numbers.scales[name])} ${clipped.has(i) ? "clipped" : ""} ${masked.has(i) ? "masked" : ""}`;
    const span = h("span", { "data-i": i, class: marks.trim() }, visible(found.texts ? found.texts[i] : id)); // thousands of tokens: no template
    return found.texts ? span : [span, " "];
  }), [found, name]);
  const box = useRef(null);
  useEffect(() => {
    const own = box.current && at !== null && box.current.querySelector(`[data-i="${at}"]`);
    if (!own) return undefined;
    own.classList.add("at");
    return () => own.classList.remove("at");
  }, [at, spans]);
  if (!found) return error ? html`<${Failure} error=${error} />` : html`<pre class="text" tabindex="0" aria-label=${t("completion")}>${visible(text)}</pre>`;
  const under = (event) => event.target.closest("span[data-i]");
  const pointed = (event) => {
    const own = under(event);
    if (own) own.title = said(found, numbers, masked, clipped, Number(own.dataset.i)); // on demand, for thousands of tokens
  };
  const clicked = (event) => under(event) && setAt(Number(under(event).dataset.i));
  const move = (by) => setAt(Math.max(0, Math.min(found.ids.length - 1, (at === null ? -1 : at) + by)));
  const pressed = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    move(by);
  };
  return html`${found.why && html`<p class="faint">${visible(found.why)}</p>`}
    ${!numbers && split === "train" && html`<p class="faint">${t(found.recorded.length ? "no_numbers_here" : "no_numbers")}${found.recorded.map((one, i) => html`${i ? ", " : " "}<a href=${link(["run", run.id, "rollouts", String(step), "train", String(one)])}>${t("group_n", { n: i + 1 })}</a>`)}</p>`}
    ${found.prompt && html`<details><summary>${t("prompt_tokens", { n: found.prompt.ids.length })}</summary><pre class="text tokens" tabindex="0">${folded(found.prompt).map(([i, many]) => html`<span title=${`${i}: ${found.prompt.ids[i]}`} class=${many > 1 ? "folded-tokens" : ""}>${visible(found.prompt.texts ? found.prompt.texts[i] : found.prompt.ids[i])}${many > 1 ? ` × ${many.toLocaleString()}` : ""}</span>${found.prompt.texts ? "" : " "}`)}</pre></details>`}
    ${names.length > 0 && html`<p class="bar"><label>${t("colour_by")} <select value=${name} onChange=${(event) => setWanted(event.target.value)}>
        ${names.map((one) => html`<option value=${one}>${t(`by_${one}`)}${alike.includes(one) ? t("all_alike") : ""}</option>`)}</select></label>
      <${Legend} name=${name} values=${numbers.columns[name]} scale=${numbers.scales[name]} />
      ${clipped.size > 0 && html`<span class="key clipped">${t("n_clipped", { n: clipped.size })}</span>`}
      ${masked.size > 0 && html`<span class="key masked">${t("n_masked", { n: masked.size })}</span>`}</p>
    ${alike.length > 0 && html`<p class="faint">${t("alike", { names: alike.map((one) => `${t(`by_${one}`)} ${number(numbers.same[one])}`).join(t("comma")) })}</p>`}
    <${Strip} name=${name} values=${numbers.columns[name]} scale=${numbers.scales[name]} at=${at} choose=${setAt} />`}
    <pre ref=${box} class=${`text tokens ${names.length ? "coloured" : ""}`} tabindex="0" onClick=${clicked} onMouseOver=${pointed} onKeyDown=${pressed} aria-label=${t("tokens_keys")} role="group">${spans}</pre>
    ${at === null ? numbers && html`<p class="faint">${t("choose_token")}</p>` : html`<${Numbers} path=${path} found=${found} masked=${masked} clipped=${clipped} at=${at} move=${move} />`}`;
}

/** Least length of a run of the same token that is shown once: a picture has one token for each of its features. */
const FOLD = 8;

/** The tokens of a prompt as [index, how many]. */
function folded({ ids }) {
  const parts = [];
  for (let i = 0; i < ids.length;) {
    let end = i + 1;
    while (end < ids.length && ids[end] === ids[i]) end += 1;
    if (end - i >= FOLD) parts.push([i, end - i]);
    else for (let at = i; at < end; at += 1) parts.push([at, 1]);
    i = end;
  }
  return parts;
}

// Characters that are invisible or change the direction of the line.
const ODD = /[\u007f-\u00a0\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;
const named = (text) => JSON.stringify(text).replace(ODD, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);

/** Tooltip of a token: all its values in one line. */
function said(found, numbers, masked, clipped, i) {
  const parts = [`${i}: ${found.texts ? named(found.texts[i]) : ""} ${found.ids[i]}`];
  if (!numbers) return parts[0];
  if (masked.has(i)) return `${parts[0]} · ${t("masked")}`;
  for (const [name, value] of known(numbers, i)) parts.push(`${t(`by_${name}`)} ${number(value)}`);
  if (clipped.has(i)) parts.push(t("clipped"));
  return parts.join(" · ");
}

/** The values of a token by name. */
function known(numbers, i) {
  const given = NUMBERS.filter((name) => name in numbers.columns).map((name) => [name, numbers.columns[name][i]]);
  return given.filter(([, value]) => value !== null && value !== undefined);
}

/** The values of a token, and how its loss is computed from them. */
function Numbers({ path, found, masked, clipped, at, move }) {
  const numbers = found.numbers && !masked.has(at) ? found.numbers : null;
  const [told, error, , fresh] = useGet(numbers ? `${path}/${at}` : null, []);
  const [line, setLine] = useState("");
  const lines = told && fresh && told.lines ? told.lines.map((one) => one.name) : [];
  const figure = (name, value) => (lines.includes(LINES[name]) ? html`<button type="button" class="to-line" title=${t("to_line")} aria-pressed=${line === LINES[name]} onClick=${() => setLine(LINES[name])}>${number(value, 4)}</button>` : number(value, 4));
  return html`<section class="token-numbers" aria-label=${t("numbers_of", { n: at })}>
    <p class="bar"><strong>${t("token_n", { n: at + 1, of: found.ids.length })}</strong><code class="chip">${found.texts ? named(found.texts[at]) : found.ids[at]}</code><span class="faint">id ${found.ids[at]}</span>
      ${clipped.has(at) && html`<span class="warning">${t("clipped")}</span>`}${masked.has(at) && html`<span class="faint">${t("masked")}</span>`}
      <span class="pager"><button class="quiet" disabled=${at === 0} aria-label=${t("token_before")} onClick=${() => move(-1)}>←</button><button class="quiet" disabled=${at === found.ids.length - 1} aria-label=${t("token_after")} onClick=${() => move(1)}>→</button></span></p>
    ${numbers && html`<dl class="numbers">${known(numbers, at).map(([name, value]) => html`<div><dt>${t(`by_${name}`)}</dt><dd>${figure(name, value)}</dd></div>`)}</dl>
    <div role="status">${told && fresh ? html`<${Lines} told=${told} chosen=${line} />` : error ? html`<${Failure} error=${error} />` : html`<p class="faint">${t("asking_algorithm")}</p>`}</div>`}</section>`;
}

function Lines({ told, chosen }) {
  const box = useRef(null);
  useEffect(() => {
    const own = chosen && box.current && box.current.querySelector(".chosen");
    if (own) own.scrollIntoView({ block: "center" });
  }, [chosen]);
  if (told.errors || told.failed) return html`<p class="faint">${t("no_lines")} ${visible(told.failed || told.errors.join(" "))}</p>`;
  return html`<h4>${t("how_loss_was_made")}</h4>
    <ol class="lines" ref=${box}>${told.lines.map((line) => html`<li class=${line.name === chosen ? "chosen" : ""}><span class="faint">${t(`line_${line.name}`)}</span><div class="math"><div>${visible(line.equation)}</div>
      <div class="put">${line.numbers && html`= ${visible(line.numbers)} `}${line.value !== null && html`= <strong>${number(line.value, 4)}</strong>`}</div></div></li>`)}</ol>
    ${told.agrees === true && html`<p class="status finished"><span aria-hidden="true">✓</span> ${t("loss_agrees")}</p>`}
    ${told.agrees === false && html`<p class="warning">! ${t("loss_differs")}</p>`}
    ${told.why && html`<p class="faint">${visible(told.why)}.</p>`}
    <details><summary>${t("whole_equation")}</summary><pre class="text math" tabindex="0">${visible(told.equation)}</pre></details>`;
}

/** Color legend; only the sides that have values. */
function Legend({ name, values, scale }) {
  const given = values.map((value) => fromNothing(name, value)).filter((value) => value !== null);
  const below = given.some((value) => value < 0);
  const above = given.some((value) => value > 0) || !below;
  const nothing = name === "ratio" ? 1 : 0;
  const levels = [...(below ? ["minus4", "minus3", "minus2", "minus1"] : []), "none", ...(above ? ["plus1", "plus2", "plus3", "plus4"] : [])];
  return html`<span class="tintscale" role="img" aria-label=${t("scale_of", { low: number(below ? nothing - scale : nothing), high: number(above ? nothing + scale : nothing) })}>
    <small>${number(below ? nothing - scale : nothing)}</small>${levels.map((level) => html`<i class=${level}></i>`)}<small>${number(above ? nothing + scale : nothing)}</small></span>`;
}

/** Bar chart of a value by position: up if positive, down if negative. */
function Strip({ name, values, scale, at, choose }) {
  const path = useMemo(() => values.map((value, i) => {
    const height = scale ? (-18 * (fromNothing(name, value) || 0)) / scale : 0;
    return `M${i + 0.5} 20v${height.toFixed(2)}`;
  }).join(""), [values, scale]);
  const clicked = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    choose(Math.max(0, Math.min(values.length - 1, Math.floor((values.length * (event.clientX - box.left)) / box.width))));
  };
  return html`<svg class="strip" viewBox=${`0 0 ${Math.max(1, values.length)} 40`} preserveAspectRatio="none" role="img" aria-label=${t("strip", { name: t(`by_${name}`) })} onClick=${clicked}>
    ${at !== null && html`<rect x=${at} y="0" width="1" height="40" />`}<path d=${path} /></svg>`;
}
