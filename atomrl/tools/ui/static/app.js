// The frame of all pages: header, navigation, help.
import { html, render, useState, useEffect, useLayoutEffect, useRef, useLive, useKept, useKeys, connection, place } from "./lib.js";
import { t, languages, setLanguage } from "./i18n.js";
import { Runs } from "./runs.js";
import { RunPage } from "./run.js";
import { Compare } from "./compare.js";
import { NewRun } from "./launch.js";
import { Study } from "./study.js";
import { Docs } from "./docs.js";
import { nameCells } from "./phone.js";

function usePlace() {
  const [at, setAt] = useState(place());
  useLayoutEffect(() => {  // in the task that draws: an effect runs after the paint, and a link followed before it is lost
    const moved = () => setAt((old) => {
      const now = place();
      if (now.path.slice(0, 3).join() !== old.path.slice(0, 3).join()) scrollTo(0, 0);
      return now;
    });
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  return at;
}

function Page({ at }) {
  const [first, ...rest] = at.path;
  if (first === "run") return html`<${RunPage} id=${rest[0]} tab=${rest[1] || "overview"} rest=${rest.slice(2)} query=${at.query} />`;
  if (first === "compare") return html`<${Compare} ids=${(rest[0] || "").split(",").filter(Boolean)} />`;
  if (first === "study") return html`<${Study} key=${rest[0]} id=${rest[0]} />`;
  if (first === "docs") return html`<${Docs} path=${rest} query=${at.query} />`;
  if (first === "new") return html`<${NewRun} query=${at.query} />`;
  return html`<${Runs} />`;
}

function Help({ close }) {
  useKeys({ Escape: close });
  const box = useRef(null);
  useEffect(() => {
    const before = document.activeElement;
    box.current.focus();
    return () => before instanceof HTMLElement && before.focus();
  }, []);
  const keys = { everywhere: ["/", "g", "?"], charts: ["← →", "+ −", "Enter"], rollouts: ["j", "k", "[", "]"] };
  return html`<section class="help" role="dialog" tabindex="-1" ref=${box} aria-label=${t("keyboard")}>
    <h2>${t("keyboard")}</h2>
    ${Object.entries(keys).map(([part, own]) => html`<h3>${t(part)}</h3><dl>${own.map((key) => html`<div><dt><kbd>${key}</kbd></dt><dd>${t(`key_${key}`)}</dd></div>`)}</dl>`)}
    <p><a href="#/docs/guides/web_interface">${t("about_pages")}</a></p>
    <button onClick=${close}>${t("close")}</button>
  </section>`;
}

function App() {
  const at = usePlace();
  const [language, setKept] = useKept("language", (navigator.language || "en").startsWith("zh") ? "zh" : "en");
  const [theme, setTheme] = useKept("theme", "auto");
  const [trouble, setTrouble] = useState("");
  const [help, setHelp] = useState(false);
  setLanguage(language);
  useEffect(() => setHelp(false), [at.path.slice(0, 3).join("/")]); // the help is about the previous page
  useLive(() => setTrouble(connection.trouble));
  useKeys({ "?": () => setHelp(!help), g: () => (location.hash = "#/") });
  useEffect(() => {
    document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    dispatchEvent(new Event("theme"));
  }, [language, theme]);
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>${t("skip")}</a>
    <header>
      <a class="brand" href="#/">AtomRL</a>
      <nav aria-label=${t("pages")}><a href="#/" aria-current=${at.path.length && at.path[0] !== "run" ? undefined : at.path.length ? "true" : "page"}>${t("runs")}</a> <a href="#/docs" aria-current=${at.path[0] === "docs" ? "page" : undefined}>${t("manual")}</a></nav>
      <span class="lost" role="status">${trouble && t(trouble)}</span>
      <label><span class="hidden">${t("language")}</span>
        <select value=${language} onChange=${(event) => setKept(event.target.value)}>
          ${Object.entries(languages).map(([code, name]) => html`<option value=${code}>${name}</option>`)}
        </select></label>
      <label><span class="hidden">${t("theme")}</span>
        <select value=${theme} onChange=${(event) => setTheme(event.target.value)}>
          ${["auto", "light", "dark"].map((name) => html`<option value=${name}>${t(name)}</option>`)}
        </select></label>
      <button class="quiet" onClick=${() => setHelp(!help)} aria-label=${t("keyboard")}>?</button>
    </header>
    <main id="main" tabindex="-1"><${Page} key=${language} at=${at} /></main>
    ${help && html`<${Help} close=${() => setHelp(false)} />`}`;
}

// uPlot is a classic script; module scripts run after it.
document.getElementById("app").replaceChildren();
render(html`<${App} />`, document.getElementById("app"));
nameCells(document.getElementById("app"));
