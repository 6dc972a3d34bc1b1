"""The whole fleet on one page."""

from __future__ import annotations

from shape import RATE, Dashboard, Panel, quantiles, rate

FLEET = Dashboard(
    "twostroke-fleet",
    "twostroke: fleet",
    [
        (
            "Who serves",
            [
                Panel(
                    "workers that serve",
                    "none",
                    [('max by (worker_role) (twostroke_fleet_workers{state="serving"})', "{{worker_role}}")],
                    kind="stat",
                ),
                Panel("routers", "none", [("count(twostroke_other_routers)", "routers")], kind="stat"),
                Panel("alerts", "none", [('count(ALERTS{alertstate="firing"}) or vector(0)', "firing")], kind="stat"),
                Panel(
                    "workers by state",
                    "none",
                    [("max by (worker_role, state) (twostroke_fleet_workers)", "{{worker_role}} {{state}}")],
                ),
                Panel("builds", "none", [("count by (role, version) (twostroke_build_info)", "{{role}} {{version}}")]),
                Panel(
                    "clocks",
                    "s",
                    [("twostroke_clock_seconds - timestamp(twostroke_clock_seconds)", "{{instance}}")],
                    "Their distance from Prometheus's own.",
                ),
                Panel(
                    "wanted",
                    "none",
                    [("max by (worker_role) (twostroke_wanted_workers)", "{{worker_role}}")],
                    "What the planner or `twostroke scale` asks for.",
                ),
                Panel(
                    "changes of what is wanted",
                    "none",
                    [
                        ("max(increase(twostroke_scaling_changes_total[1h]))", "changes"),
                        ("max(increase(twostroke_role_switches_total[1h]))", "roles switched"),
                    ],
                    "Over an hour.",
                ),
            ],
        ),
        (
            "Requests",
            [
                Panel(
                    "requests",
                    "reqps",
                    [(rate("twostroke_requests_total", "status"), "{{status}}")],
                    "Ended, by status.",
                ),
                Panel(
                    "open and queued",
                    "none",
                    [("sum(twostroke_open_requests)", "open"), ("sum(twostroke_queued_requests)", "queued in routers")],
                ),
                Panel(
                    "tokens",
                    "none",
                    [
                        (rate("twostroke_prompt_tokens_total"), "prompt"),
                        (rate("twostroke_generation_tokens_total"), "generated"),
                    ],
                    "Per second.",
                ),
                Panel("time to first token", "s", quantiles("twostroke_ttft_seconds", of=(0.5, 0.95, 0.99))),
                Panel("between tokens", "s", quantiles("twostroke_inter_token_latency_seconds", of=(0.5, 0.95, 0.99))),
                Panel(
                    "where the time goes",
                    "s",
                    quantiles("twostroke_stage_seconds", "role, stage", of=(0.95,)),
                    "Stages of requests, p95: the names of `twostroke trace`.",
                ),
            ],
        ),
        (
            "Work and pages",
            [
                Panel(
                    "queued",
                    "s",
                    [("twostroke_queued_seconds", "{{role}} {{instance}}")],
                    "Predicted time to compute the prompts that wait.",
                ),
                Panel(
                    "time spent on prompts",
                    "percentunit",
                    [(f"rate(twostroke_prefill_busy_seconds_total[{RATE}])", "{{role}} {{instance}}")],
                ),
                Panel("pages", "none", [("sum by (role, state) (twostroke_pages)", "{{role}} {{state}}")]),
                Panel(
                    "prompt tokens reused",
                    "percentunit",
                    [(f"{rate('twostroke_cached_tokens_total')} / {rate('twostroke_prompt_tokens_total')}", "reused")],
                ),
                Panel(
                    "pages moved",
                    "Bps",
                    [(rate("twostroke_pull_bytes_total", "transport"), "{{transport}}")],
                    "By transport.",
                ),
                Panel("pulls that failed", "ops", [(rate("twostroke_pull_failures_total", "reason"), "{{reason}}")]),
            ],
        ),
    ],
)
