"""The table of all metrics in docs/metrics.md: `python -m kvferry.daemon.observe.metrics_table` prints it."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.daemon.observe.metrics import families
from kvferry.proto import cache_pb2 as cache


def rows() -> Iterator[str]:
    """A line of Markdown for each metric, in the order of an answer."""
    for family in families(cache.StatsReply()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = ", ".join(f"`{label}`" for label in getattr(family, "_labelnames", ())) or "-"
        yield f"| `{name}` | {family.type} | {labels} | {family.documentation} |"


if __name__ == "__main__":
    print("\n".join(rows()))
