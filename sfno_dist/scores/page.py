"""Scores as one HTML page that opens from disk without network: no script, pictures within it."""

from __future__ import annotations

from html import escape

import xarray as xr

from sfno_dist.scores import pictures
from sfno_dist.scores.table import initial_times, rows

STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 1240px; padding: 28px 24px 60px; background: #fff; color: #1d252d;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 44px 0 6px; padding-top: 14px;
  border-top: 1px solid #dfe4e9; } h3 { font-size: 15px; margin: 22px 0 4px; color: #4a535d; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; margin: 14px 0; }
dt { color: #66707a; } dd { margin: 0; overflow-wrap: anywhere; }
.notes { background: #fff8ec; border-left: 3px solid #d9a441; padding: 8px 14px; margin: 16px 0; }
.notes p { margin: 2px 0; }
nav a { display: inline-block; margin: 0 14px 4px 0; color: #1f5fa8; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: right; padding: 4px 10px; border-bottom: 1px solid #eceff2; white-space: nowrap; }
th { color: #4a535d; font-weight: 600; background: #f6f8fa; } th:first-child, td:first-child { text-align: left; }
tr.first td { border-top: 1px solid #b9c2cb; } figure { margin: 0; } img { width: 100%; height: auto; display: block; }
figcaption, footer { color: #66707a; font-size: 13px; } footer { margin-top: 44px; }
"""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(result: xr.Dataset) -> str:
    """The whole page."""
    names = [str(name) for name in result.variable.values]
    links = "".join(f'<a href="#v{n}">{escape(name)}</a>' for n, name in enumerate(names))
    notes = "".join(f"<p>{escape(note)}</p>" for note in result.attrs["notes"].splitlines())
    parts = [
        "<h1>Forecast scores</h1>",
        _facts(result),
        f'<div class="notes">{notes}</div>' if notes else "",
        "<h2>Over the globe</h2>",
        _table(result),
        "<p><small>RMSE is that of the forecast; under persistence and climatology stands theirs.</small></p>",
        f"<nav>{links}</nav>" if len(names) > 1 else "",
        *(_variable(result, name, f"v{n}") for n, name in enumerate(names)),
        f"<footer>{escape(result.attrs['source'])}</footer>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>Forecast scores</title><style>{STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _facts(result: xr.Dataset) -> str:
    about = result.attrs
    facts = {
        "forecast": about["forecast"],
        "truth": about["truth"],
        "climatology": about["climatology"] or "none",
        "scored over": initial_times(result),
        "members": str(about["members"]),
    }
    return "<dl>" + "".join(f"<dt>{key}</dt><dd>{escape(text)}</dd>" for key, text in facts.items()) + "</dl>"


def _table(result: xr.Dataset) -> str:
    head, cells = rows(result)
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    for n, row in enumerate(cells):
        first = n == 0 or cells[n - 1][0] != row[0]
        shown = row if first else ["", "", *row[2:]]
        lines.append(
            f"<tr{' class=first' if first else ''}>" + "".join(f"<td>{escape(cell)}</td>" for cell in shown) + "</tr>"
        )
    return '<div class="wide"><table>' + "".join(lines) + "</table></div>"


def _variable(result: xr.Dataset, name: str, anchor: str) -> str:
    units = str(result.units.sel(variable=name).values)
    figures = (
        ("Scores by lead time", pictures.curves, "each score over the lead time in four regions"),
        ("Zonal power spectra", pictures.spectra, "units squared times metres, mean over the rows of the region"),
        ("Maps", pictures.maps, "bias and RMSE at each point, over all initial times; grey: no values"),
    )
    shown = "".join(
        f'<h3>{title}</h3><figure><img alt="{escape(f"{title} of {name}")}" src="{draw(result, name)}">'
        f"<figcaption>{caption}</figcaption></figure>"
        for title, draw, caption in figures
    )
    return f'<section id="{anchor}"><h2>{escape(name)}{f" ({escape(units)})" if units else ""}</h2>{shown}</section>'
