"use strict";
// What the server-rendered pages need beyond htmx: one live connection tells when to look again.

(() => {
  const REFRESH_MS = 500;
  const ITEMS_MS = 1500;
  const SETTLED_MS = 2200; // by then the server has read anew what it remembers for a moment
  const LOG_LINES = 500;
  const FRACTIONS = 1000;

  // -- looking again: at most so often, and once more after the last event

  function throttled(milliseconds, action) {
    let timer = null;
    let last = -Infinity;
    return () => {
      if (timer !== null) return;
      const wait = Math.max(0, last + milliseconds - performance.now());
      timer = setTimeout(() => {
        timer = null;
        last = performance.now();
        action();
      }, wait);
    };
  }

  const refresh = throttled(REFRESH_MS, () => htmx.trigger(document.body, "fanout:refresh"));
  const refreshItems = throttled(ITEMS_MS, () => {
    const items = document.getElementById("items");
    if (!items) return;
    const table = items.querySelector("table");
    const paged = table !== null && table.dataset.after !== "-1";
    if (!paged && !items.contains(document.activeElement)) {
      htmx.trigger(document.body, "fanout:items");
    }
  });

  let settling = null;

  function lookAgain() {
    refresh();
    refreshItems();
    clearTimeout(settling);
    settling = setTimeout(() => {
      refresh();
      refreshItems();
    }, SETTLED_MS);
  }

  // -- how far single items are, as far as they tell

  const fractions = new Map();

  function showFractions() {
    for (const bar of document.querySelectorAll(".fraction")) {
      const fraction = fractions.get(bar.dataset.position);
      bar.hidden = fraction === undefined;
      if (fraction !== undefined) bar.value = fraction;
    }
  }

  function tellFractions(event) {
    const items = JSON.parse(event.data).items ?? {};
    for (const [position, fraction] of Object.entries(items)) {
      fractions.delete(position); // the latest stand last
      fractions.set(position, fraction);
    }
    while (fractions.size > FRACTIONS) fractions.delete(fractions.keys().next().value);
    showFractions();
  }

  // -- the live connection, and whether looking again brought an answer

  let streamed = null; // what the page itself says, until the stream tells
  let unanswered = null;

  function connection() {
    const shown = document.getElementById("connection");
    if (!shown) return;
    streamed ??= shown.textContent;
    const text = unanswered ?? streamed;
    if (shown.textContent !== text) shown.textContent = text;
    shown.classList.toggle("bad", unanswered !== null);
  }

  function tellStream(text) {
    streamed = text;
    connection();
  }

  // The stream may well be open while what is asked for fails: its figures are old then.
  function tellAnswer(text) {
    unanswered = text;
    connection();
  }

  for (const kind of ["htmx:responseError", "htmx:sendError", "htmx:timeout"]) {
    document.addEventListener(kind, (event) => {
      const status = event.detail.xhr.status;
      tellAnswer(status >= 400 && status < 500 ? `refused (${status})` : "no answer");
    });
  }
  document.addEventListener("htmx:afterRequest", (event) => {
    if (event.detail.successful) tellAnswer(null);
  });

  function listen(url) {
    const source = new EventSource(url);
    source.addEventListener("open", () => tellStream("live"));
    source.addEventListener("error", () => tellStream("reconnecting"));
    for (const kind of ["snapshot", "progress", "resync", "changed"]) {
      source.addEventListener(kind, lookAgain);
    }
    source.addEventListener("progress", tellFractions);
    source.addEventListener("log", (event) => {
      const line = JSON.parse(event.data);
      if ("dropped" in line) return addLine(line.at, "", `${line.dropped} lines left out`, "");
      const more = line.data && Object.keys(line.data).length ? JSON.stringify(line.data) : "";
      addLine(line.at, line.key ?? `item ${line.position}`, `${line.message} ${more}`.trim(), "");
    });
    source.addEventListener("item_failed", (event) => {
      const line = JSON.parse(event.data);
      if ("more" in line) addLine(line.at, "", `${line.more} more items failed`, "bad");
      else addLine(line.at, line.key ?? `item ${line.position}`, `${line.type}: ${line.message}`, "bad");
      lookAgain();
    });
    source.addEventListener("closed", () => {
      tellStream("closed");
      source.close();
      lookAgain();
    });
    return source;
  }

  htmx.createEventSource = listen;

  // -- the log: text, never markup

  function part(kind, text) {
    const made = document.createElement("span");
    made.className = kind;
    made.textContent = text;
    return made;
  }

  function addLine(at, key, message, kind) {
    const log = document.getElementById("log");
    if (!log) return;
    document.getElementById("log-empty")?.remove();
    const following = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    const line = document.createElement("li");
    if (kind) line.className = kind;
    const when = new Date(at);
    line.append(part("when", when.toLocaleTimeString()), " ");
    if (key) line.append(part("key", key), " ");
    line.append(part("message", message));
    log.append(line);
    while (log.children.length > LOG_LINES) log.firstElementChild.remove();
    if (following) log.scrollTop = log.scrollHeight;
  }

  // -- what screen readers are told: each tenth, and each change of state

  let told = "";

  function announce() {
    const title = document.querySelector("[data-percent]");
    const region = document.getElementById("announce");
    if (!title || !region) return;
    const { status, percent } = title.dataset; // no percent: nothing was listed
    const now = percent === "" ? status : `${status}, ${Math.floor(percent / 10) * 10} percent`;
    if (now !== told && told !== "") region.textContent = now;
    told = now;
    document.title = document.title.replace(/^(\d+ % )?/, percent === "" ? "" : `${percent} % `);
  }

  // -- times in the reader's zone

  function localTimes(root) {
    for (const shown of root.querySelectorAll("time[datetime]")) {
      const when = new Date(shown.dateTime);
      const today = when.toDateString() === new Date().toDateString();
      shown.title = when.toISOString();
      shown.textContent = today ? when.toLocaleTimeString() : when.toLocaleString();
    }
  }

  // -- questions before actions

  document.addEventListener("click", (event) => {
    const opener = event.target.closest("[data-opens]");
    if (opener) document.getElementById(`dialog-${opener.dataset.opens}`)?.showModal();
    if (event.target.closest("[data-closes]")) event.target.closest("dialog").close();
  });

  // The button that asked may have been replaced meanwhile: give the focus to its successor.
  document.addEventListener("close", (event) => {
    document.getElementById(event.target.id.replace("dialog-", "ask-"))?.focus();
  }, true);

  // -- figures of the chart

  document.addEventListener("pointerover", (event) => {
    const bar = event.target.closest?.(".part");
    const tip = document.querySelector(".tip");
    if (tip) tip.textContent = bar ? bar.dataset.tip : "";
  });

  document.addEventListener("DOMContentLoaded", () => {
    localTimes(document);
    announce();
  });
  document.addEventListener("htmx:afterSwap", (event) => {
    localTimes(event.target);
    showFractions();
    announce();
  });
})();
