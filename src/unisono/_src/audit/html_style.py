"""The style of the HTML report: light and dark, for wide screens, narrow ones and paper."""

COLOURS = """
:root {
  color-scheme: light dark;
  --paper: #fcfcfa; --card: #ffffff; --ink: #1b1f24; --quiet: #57606a; --line: #d9dde2; --accent: #44546a; --wash: #eef1f4;
}
.same { --accent: #0a6b4b; --wash: #e7f4ee; }
.parted { --accent: #b42318; --wash: #fdecea; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171b; --card: #1b1f24; --ink: #e7eaed; --quiet: #9aa5b1; --line: #343b43; --accent: #a9b8c9; --wash: #232a31; }
  .same { --accent: #5fd3a6; --wash: #14291f; }
  .parted { --accent: #ff8f7f; --wash: #351b18; }
}
"""

TEXT = """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; background: var(--paper); }
body {
  margin: 0 auto; padding: 40px 32px 72px; max-width: 1080px; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere;
}
h1 > span:last-child { min-width: 0; overflow-wrap: break-word; }
code, pre { font-family: ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: .875em; }
code, .quoted, b, dd { unicode-bidi: isolate; }
p { margin: 0 0 12px; max-width: 72ch; }
h1 {
  display: flex; gap: .35em; margin: 0 0 16px; font-size: clamp(28px, 5vw, 44px); line-height: 1.14;
  letter-spacing: -.02em; text-wrap: balance;
}
h1 code { font-size: .82em; letter-spacing: -.03em; }
h2 { margin: 0 0 16px; font-size: 22px; line-height: 1.25; letter-spacing: -.01em; }
h3 { margin: 24px 0 8px; font-size: 16px; }
section { margin-top: 56px; }
section section { margin-top: 0; }
figure { margin: 0 0 28px; }
figcaption { margin-bottom: 8px; color: var(--quiet); }
figcaption b { color: var(--ink); }
ul { margin: 0 0 12px; padding-left: 20px; }
summary { cursor: pointer; color: var(--accent); font-weight: 600; }
details { margin: 16px 0; }
details > :nth-child(2) { margin-top: 16px; }
.note, .axis-name { color: var(--quiet); font-size: 14px; }
.brand { margin-bottom: 20px; color: var(--quiet); font-size: 14px; font-weight: 600; letter-spacing: .02em; }
.sign { color: var(--accent); }
.sentence { font-size: 19px; line-height: 1.5; }
.facts { display: flex; flex-wrap: wrap; gap: 4px 24px; margin: 20px 0 0; padding: 0; color: var(--quiet); list-style: none; }
.tag {
  padding: 1px 8px; border: 1px solid var(--line); border-radius: 10px; color: var(--quiet); font-size: 13px;
  font-weight: 400; white-space: nowrap;
}
.advice { margin: 0 0 24px; padding: 14px 18px; border-left: 4px solid var(--accent); background: var(--wash); }
.advice h3 { margin: 0 0 4px; }
.advice p { margin: 0; white-space: pre-line; }
.warnings li { margin-bottom: 6px; }
.odd { color: var(--accent); font-weight: 600; }
.even { color: var(--quiet); }
pre {
  margin: 0; padding: 14px 16px; overflow-x: auto; border: 1px solid var(--line); border-radius: 6px;
  background: var(--card); line-height: 1.6;
}
.source pre { padding: 10px 0; }
.line { display: block; padding: 0 16px 0 0; width: max-content; min-width: 100%; color: var(--quiet); }
.line.meant { background: var(--wash); box-shadow: inset 4px 0 var(--accent); color: var(--ink); font-weight: 600; }
.line-number { display: inline-block; width: 6ch; padding-right: 2ch; text-align: right; user-select: none; }
"""

TABLES = """
table { width: 100%; border-collapse: collapse; font-size: 15px; }
th { font-weight: 400; text-align: left; }
thead th { padding: 0 12px 6px 0; border-bottom: 1px solid var(--line); color: var(--quiet); font-size: 13px; vertical-align: bottom; }
td.number, th.number { text-align: right; white-space: nowrap; }
.runs td, .runs tbody th { padding: 9px 12px 9px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.runs tbody th { font-weight: 600; }
dl { margin: 0; }
dl div { display: grid; grid-template-columns: 150px minmax(0, 1fr); gap: 16px; padding: 7px 0; border-bottom: 1px solid var(--line); }
dl div:first-child { border-top: 1px solid var(--line); }
dt { color: var(--quiet); }
dd { margin: 0; min-width: 0; }
"""

PLOTS = """
svg { display: block; }
.plot { display: grid; grid-template-columns: auto minmax(0, 1fr); gap: 0 8px; }
.area {
  grid-column: 2; width: 100%; height: 300px; overflow: visible; border-left: 1px solid var(--line);
  border-bottom: 1px solid var(--line);
}
.grid { stroke: var(--line); stroke-width: 1; }
.curve {
  fill: none; stroke: color-mix(in srgb, var(--ink) var(--part), var(--paper)); stroke-linecap: round;
  stroke-linejoin: round; vector-effect: non-scaling-stroke;
}
.curve.parted { stroke: color-mix(in srgb, var(--accent) var(--part), var(--paper)); stroke-linecap: butt; }
.cross { fill: var(--ink); font-size: 20px; font-weight: 700; }
.cross.parted { fill: var(--accent); }
.first { fill: none; stroke: var(--accent); stroke-width: 2; vector-effect: non-scaling-stroke; }
.mark {
  fill: var(--accent); font-size: 13px; font-weight: 600; paint-order: stroke; stroke: var(--paper); stroke-width: 4px;
  stroke-linejoin: round;
}
.y-labels { position: relative; min-width: 3ch; color: var(--quiet); font-size: 13px; }
.y-labels span { position: absolute; right: 0; transform: translateY(-50%); white-space: nowrap; }
.x-labels { position: relative; grid-column: 2; height: 22px; color: var(--quiet); font-size: 13px; }
.x-labels span { position: absolute; top: 4px; transform: translateX(-50%); white-space: nowrap; }
.legend { margin: 16px 0 0; padding: 0; list-style: none; font-size: 15px; }
.legend li { display: flex; gap: 12px; margin-bottom: 4px; }
.legend svg { flex: none; margin-top: 4px; }
.levels {
  display: flex; flex-wrap: wrap; gap: 4px 20px; margin: 0 0 16px; padding: 0; list-style: none; color: var(--quiet);
  font-size: 14px;
}
.levels li { display: flex; gap: 8px; align-items: center; }
.levels svg { flex: none; }
.level0 { fill: var(--line); fill-opacity: .45; }
.level1 { fill: var(--accent); fill-opacity: .28; }
.level2 { fill: var(--accent); fill-opacity: .5; }
.level3 { fill: var(--accent); fill-opacity: .75; }
.level4 { fill: var(--accent); }
.heat { table-layout: fixed; font-size: 14px; }
.heat th:first-child { width: 30%; }
.heat thead th:last-child { width: 96px; padding-right: 0; text-align: right; }
.heat tbody th { padding: 2px 12px 2px 0; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; direction: ltr; }
.heat td { padding: 0; vertical-align: middle; }
.heat td.number { color: var(--quiet); font-size: 13px; }
.heat .named th, .heat .named td.number { color: var(--accent); font-weight: 600; }
.strip {
  width: 100%; height: 20px; border-top: 1px solid var(--paper);
  background: color-mix(in srgb, var(--line) 45%, transparent); shape-rendering: crispEdges;
}
.rows { table-layout: fixed; }
.rows th:first-child { width: 9ch; }
.rows td.number { padding: 3px 0; }
.rows th.number { width: 11ch; padding-right: 0; }
.bar { width: 100%; height: 16px; }
.seen { fill: var(--quiet); fill-opacity: .55; }
.twice { fill: url(#hatched); }
.ground { fill: var(--paper); }
.stripe { fill: var(--accent); }
.missing { fill: none; stroke: var(--accent); stroke-width: 1.5; stroke-dasharray: 4 3; }
"""

NARROW = """
@media (max-width: 700px) {
  body { padding: 24px 16px 48px; }
  section { margin-top: 40px; }
  .sentence { font-size: 17px; }
  .area { height: 220px; }
  dl div { grid-template-columns: minmax(0, 1fr); gap: 0; }
  .runs thead { display: none; }
  .runs tr { display: block; padding: 10px 0; border-bottom: 1px solid var(--line); }
  .runs td, .runs tbody th { display: flex; justify-content: space-between; gap: 16px; padding: 2px 0; border: 0; text-align: right; }
  .runs td::before { content: attr(data-label); flex: none; max-width: 45%; color: var(--quiet); text-align: left; }
  .heat thead, .heat tfoot td:not(:nth-child(2)) { display: none; }
  .heat, .heat tbody, .heat tfoot { display: block; }
  .heat tr { display: grid; grid-template-columns: minmax(0, 1fr) auto; }
  .heat tbody th { width: auto !important; padding: 5px 12px 1px 0; }
  .heat td:nth-child(2) { grid-row: 2; grid-column: 1 / -1; }
  .heat td.number { padding-top: 5px; }
  .strip { height: 14px; }
  .rows thead th { font-size: 12px; }
  .rows th:first-child { width: 54px; padding-right: 0; }
  .rows th.number { width: 44px; }
  .rows th.number:nth-child(4) { width: 78px; }
  .rows th.number:nth-child(5) { width: 60px; }
}
"""

PAPER = """
@media print {
  :root { color-scheme: light; --paper: #fff; --card: #fff; --ink: #000; --quiet: #444; --line: #bbb; }
  .same { --accent: #0a6b4b; --wash: #e7f4ee; }
  .parted { --accent: #b42318; --wash: #fdecea; }
  body { padding: 0; max-width: none; font-size: 11pt; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  h2, h3 { break-after: avoid; }
  figure, tr, .advice { break-inside: avoid; }
  pre { white-space: pre-wrap; }
  .line { width: auto; }
  details::details-content { content-visibility: visible; height: auto; }
}
"""

STYLE = COLOURS + TEXT + TABLES + PLOTS + NARROW + PAPER
