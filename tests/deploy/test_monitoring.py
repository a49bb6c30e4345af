"""The dashboard and the alerts: every metric that they query exists, with the labels that they name; promtool takes the
rules, and a test of them fires each.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import pytest
import yaml

from kvferry.daemon.observe.metrics import families
from kvferry.daemon.observe.metrics_table import rows as table_rows
from kvferry.proto import cache_pb2 as cache
from tests.daemon.observe.snapshots import snapshot

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "kvferry.rules.yaml"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "kvferry.json"
DOCS = DEPLOY.parent / "docs"
PROMETHEUS_OWN = {"up"}  # that Prometheus makes of each scrape
SCRAPED = {"instance", "job", "le"}  # labels that the scrape or a histogram's buckets add


def sample_labels() -> dict[str, set[str]]:
    """By sample name, its labels' names."""
    reply = snapshot()
    reply.loop_lag.CopyFrom(cache.Histogram(bounds=[1.0], counts=[0, 0]))
    return {s.name: set(s.labels) for family in families(reply) for s in family.samples}


SAMPLES = sample_labels()


def queries() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of the dashboard, its variables and the rules."""
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            text = target["expr"].replace("$__rate_interval", "1m").replace("$__range", "1h")
            text = text.replace("$instance", ".*").replace("$role", ".*")
            yield panel["title"], text
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
            assert found, variable
            label = found[2]
            yield f"variable {variable['name']}", f"sum by ({label}) ({found[1]})"
    for rule in rules():
        yield rule["alert"], rule["expr"]


def rules() -> list[dict[str, str]]:
    found: list[dict[str, str]] = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    return found


def selectors(node: object) -> Iterator[promql_parser.VectorSelector]:
    """All vector selectors under a node of the syntax tree."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
        return
    for name in ("expr", "lhs", "rhs", "param", "vector_selector", "vs"):
        child = getattr(node, name, None)
        if child is not None:
            yield from selectors(child)
    for child in getattr(node, "args", None) or []:
        yield from selectors(child)


QUERIES = list(queries())


@pytest.mark.parametrize(("where", "text"), QUERIES, ids=[where for where, _ in QUERIES])
def test_every_metric_of_a_query_exists(where: str, text: str) -> None:
    found = list(selectors(promql_parser.parse(text)))
    named = set(re.findall(r"\bkvferry_\w+", text))
    assert {selector.name for selector in found} - PROMETHEUS_OWN == named, "a selector was missed"
    for selector in found:
        if selector.name in PROMETHEUS_OWN:
            continue
        assert selector.name in SAMPLES, f"{where}: {selector.name} is no metric"
        for matcher in selector.matchers.matchers:
            assert matcher.name in SAMPLES[selector.name] | SCRAPED, f"{where}: {selector.name} has no {matcher.name}"


def test_queries_are_looked_at_by_their_parts() -> None:
    """The walk finds what it must: else the test above would pass for anything."""
    text = 'histogram_quantile(0.9, sum by (le) (rate(a{x="1"}[5m]))) / on (x) (b or (c + -d)) > bool e'
    assert {selector.name for selector in selectors(promql_parser.parse(text))} == {"a", "b", "c", "d", "e"}


def test_the_metrics_that_matter_are_shown() -> None:
    shown = " ".join(text for _, text in QUERIES)
    for name in ("hit_tokens", "saved_bytes", "delta_bytes", "admit_to_ready", "pages", "slots", "event_loop_lag"):
        assert f"kvferry_{name}" in shown


def test_the_dashboard_can_be_provisioned() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    assert dashboard["uid"] == "kvferry"
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    text = DASHBOARD.read_text()
    assert set(re.findall(r"\$\{?([a-z]\w*)", text)) <= variables
    boxes = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert all(x + w <= 24 for _, w, x, _ in boxes)


def test_the_first_row_says_good_or_bad_at_a_glance() -> None:
    row, *panels = json.loads(DASHBOARD.read_text())["panels"]
    first = [panel for panel in panels if panel["gridPos"]["y"] == row["gridPos"]["y"] + 1]
    assert row["type"] == "row" and row["gridPos"]["y"] == 0 and sum(panel["gridPos"]["w"] for panel in first) == 24
    for panel in first:
        defaults, options = panel["fieldConfig"]["defaults"], panel["options"]
        steps = [(step["color"], step["value"]) for step in defaults["thresholds"]["steps"]]
        assert panel["type"] == "stat" and options["colorMode"] == "background" and panel["description"]
        assert len(panel["targets"]) == 1, "one number"
        assert steps[0][1] is None and {"green", "red"} <= {color for color, _ in steps}
        values = [value for _, value in steps[1:]]
        assert values == sorted(values) and defaults["color"]["mode"] == "thresholds"
    shown = " ".join(panel["targets"][0]["expr"] for panel in first)
    for name in (
        "hit_tokens",
        "requests_ended",
        "checksum_mismatches",
        "failed_copy",
        "dropped_pages",
        "evictable_pages",
    ):
        assert f"kvferry_{name}" in shown


def test_seven_alerts_each_with_what_to_do() -> None:
    found = rules()
    assert len(found) == 7
    alerts = (DOCS / "operate" / "alerts.md").read_text()
    for rule in found:
        annotations: dict[str, str] = rule["annotations"]  # type: ignore[assignment]
        page, _, anchor = annotations["runbook_url"].partition("#")
        assert page == "docs/operate/alerts.md"
        assert anchor == rule["alert"].lower()
        assert re.search(rf"^#+ {rule['alert']}$", alerts, re.MULTILINE), f"docs/operate/alerts.md: no {rule['alert']}"


SERIES = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: 'up{{job="kvferry", instance="d"}}', values: '0x20'}}
      - {{series: 'kvferry_peer_up{{instance="d", role="decode", peer="p0"}}', values: '1x3 0x20'}}
      - {{series: 'kvferry_requests{{instance="d", role="decode", state="waiting"}}', values: '3x20'}}
      - {{series: 'kvferry_transfers_ended_total{{instance="d", role="decode", outcome="completed", reason="ok"}}',
         values: '0+10x20'}}
      - {{series: 'kvferry_transfers_ended_total{{instance="d", role="decode", outcome="failed", reason="x"}}',
         values: '0+5x20'}}
      - {{series: 'kvferry_checksum_mismatches_total{{instance="d", role="decode", kind="part"}}', values: '0x10 1x20'}}
      - {{series: 'kvferry_orphaned_pages{{instance="d", role="decode"}}', values: '2x20'}}
      - {{series: 'kvferry_pool_pages{{instance="d", role="decode", tier="host"}}', values: '5x20'}}
      - {{series: 'kvferry_pool_asked_pages{{instance="d", role="decode", tier="host"}}', values: '9x20'}}
    alert_rule_test:
"""
FIRING = """
      - eval_time: 15m
        alertname: {alert}
        exp_alerts:
          - exp_labels: {{{labels}}}
            exp_annotations: {annotations}
"""


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not here: apt-get install prometheus")
def test_promtool_takes_the_rules_and_each_fires(tmp_path: Path) -> None:
    done = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        ["promtool", "check", "config", str(RULES.parent / "prometheus.yaml")], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    text = SERIES.format(rules=RULES)
    own = {
        "KvferryDown": {"job": "kvferry"},
        "KvferryPeerDown": {"role": "decode", "peer": "p0"},
        "KvferryAdmissionStalled": {"role": "decode", "state": "waiting"},
        "KvferryTransfersFailing": {"role": "decode"},
        "KvferryChecksumMismatch": {"role": "decode", "kind": "part"},
        "KvferryPagesHeld": {"role": "decode"},
        "KvferryHostTierSmall": {"role": "decode", "tier": "host"},
    }
    for rule in rules():
        labels = {**own[rule["alert"]], "instance": "d", "severity": rule["labels"]["severity"]}  # type: ignore[index]
        labels.pop("__name__", None)
        annotations = {
            name: value.replace("{{ $labels.instance }}", "d")
            .replace("{{ $labels.role }}", "decode")
            .replace("{{ $labels.peer }}", "p0")
            .replace("{{ $labels.kind }}", "part")
            .replace("{{ $value | humanizePercentage }}", "33.33%")
            for name, value in rule["annotations"].items()  # type: ignore[attr-defined]
        }
        text += FIRING.format(
            alert=rule["alert"],
            labels=", ".join(f"{name}: {value}" for name, value in labels.items()),
            annotations=json.dumps(annotations),
        )
    (tmp_path / "rules.test.yaml").write_text(text)
    done = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "rules.test.yaml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_documentation_has_every_metric() -> None:
    text = (DOCS / "metrics.md").read_text()
    missing = [row for row in table_rows() if row not in text.splitlines()]
    assert not missing, "docs/metrics.md: run python -m kvferry.daemon.observe.metrics_table"
    named = set(re.findall(r"kvferry_[a-z_]+", text))
    known = {sample.removesuffix("_created") for sample in SAMPLES} | {
        family.name for family in families(cache.StatsReply())
    }
    assert named <= known, named - known
