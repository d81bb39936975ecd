// A layout in the colours of the page it stands on; reports and the lab draw with it.
export function themed(layout) {
  const style = getComputedStyle(document.documentElement), of = name => style.getPropertyValue(name).trim();
  const narrow = window.innerWidth < 600;
  const axis = own => ({gridcolor: of("--line"), linecolor: of("--line"), zeroline: false, automargin: true, ...own,
    title: {standoff: 8, ...own.title}});
  return {...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: {family: "system-ui, sans-serif", size: narrow ? 11 : 13, color: of("--ink")},
    hoverlabel: {bgcolor: of("--card"), bordercolor: of("--line"), font: {color: of("--ink")}, align: "left"},
    margin: {l: 8, r: 12, t: 8, b: 8}, legend: {orientation: "h", y: 1.02, yanchor: "bottom", x: 0},
    xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis),
    shapes: (layout.shapes || []).map(s => ({...s, line: {...s.line, color: of("--soft")}}))};
}
