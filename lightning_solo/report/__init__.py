"""Charts of a run, a sweep or a ladder: an HTML page that needs no network, PNG files, and images for TensorBoard.

```
folder -> read_run, read_sweep, read_ladder   from files; an unreadable file becomes a note
       -> Report                              figures, tables, facts: plain data, no HTML
       -> page (HTML), pictures (PNG, TensorBoard)
```
"""

from __future__ import annotations

from lightning_solo.report.write import Written, write_report

__all__ = ["Written", "write_report"]
