"""One worker, or some of them side by side."""

from __future__ import annotations

from shape import ONE, Dashboard, Panel, quantiles, rate

HITS = rate("twostroke_prefix_cache_hits_total", "instance", ONE)
HIT_RATIO = f"{HITS} / {rate('twostroke_prefix_cache_queries_total', 'instance', ONE)}"
TIER_HITS = rate("twostroke_tier_hits_total", "tier", ONE)

WORKER = Dashboard(
    "twostroke-worker",
    "twostroke: one worker",
    [
        (
            "Work",
            [
                Panel(
                    "sequences",
                    "none",
                    [
                        (f"twostroke_requests_running{ONE}", "running {{instance}}"),
                        (f"twostroke_requests_waiting{ONE}", "waiting {{instance}}"),
                    ],
                ),
                Panel("queued", "s", [(f"twostroke_queued_seconds{ONE}", "{{instance}}")]),
                Panel(
                    "tokens computed",
                    "none",
                    [
                        (rate("twostroke_computed_tokens_total", "instance", ONE), "computed {{instance}}"),
                        (rate("twostroke_sampled_tokens_total", "instance", ONE), "sampled {{instance}}"),
                    ],
                    "Per second.",
                ),
                Panel("steps", "s", quantiles("twostroke_step_seconds", "kind", ONE)),
                Panel("steps by kind", "ops", [(rate("twostroke_step_seconds_count", "kind", ONE), "{{kind}}")]),
                Panel("stages", "s", quantiles("twostroke_stage_seconds", "stage", ONE, of=(0.95,))),
            ],
        ),
        (
            "Pages",
            [
                Panel("pages", "none", [(f"twostroke_pages{ONE}", "{{state}} {{instance}}")]),
                Panel(
                    "prefix cache",
                    "percentunit",
                    [
                        (
                            HIT_RATIO,
                            "hits {{instance}}",
                        )
                    ],
                ),
                Panel(
                    "preempted, local prefill",
                    "ops",
                    [
                        (rate("twostroke_preemptions_total", "instance", ONE), "preempted {{instance}}"),
                        (rate("twostroke_local_prefills_total", "instance", ONE), "local prefill {{instance}}"),
                    ],
                ),
                Panel("pulls on the wire", "s", quantiles("twostroke_pull_seconds", "transport", ONE)),
                Panel(
                    "pages served to others",
                    "ops",
                    [(rate("twostroke_served_pages_total", "instance", ONE), "{{instance}}")],
                ),
                Panel(
                    "from peers", "Bps", [(rate("twostroke_peer_pulled_bytes_total", "instance", ONE), "{{instance}}")]
                ),
            ],
        ),
        (
            "Pages converted for workers of another form",
            [
                Panel(
                    "converted",
                    "ops",
                    [(rate("twostroke_converted_pages_total", "instance", ONE), "{{instance}}")],
                ),
                Panel(
                    "busy share of the converting thread",
                    "percentunit",
                    [(rate("twostroke_conversion_seconds_total", "instance", ONE), "{{instance}}")],
                ),
                Panel(
                    "bytes served",
                    "Bps",
                    [
                        (rate("twostroke_converted_original_bytes_total", "instance", ONE), "as they lie {{instance}}"),
                        (rate("twostroke_converted_sent_bytes_total", "instance", ONE), "as sent {{instance}}"),
                    ],
                    "The difference is what conversion saves on the wire.",
                ),
            ],
        ),
        (
            "Pins",
            [
                Panel(
                    "pages of pins",
                    "none",
                    [
                        (f"twostroke_pinned_pages{ONE}", "pinned {{instance}}"),
                        (f"twostroke_pin_pages_limit{ONE}", "at most {{instance}}"),
                    ],
                    "Distinct pages, in use or not.",
                ),
                Panel(
                    "computing spared",
                    "none",
                    [
                        (rate("twostroke_pin_saved_seconds_total", "instance", ONE), "seconds {{instance}}"),
                        (rate("twostroke_pin_hits_total", "instance", ONE), "hits {{instance}}"),
                    ],
                    "Per second.",
                ),
                Panel(
                    "refused, expired, displaced",
                    "ops",
                    [
                        (rate("twostroke_pin_refusals_total", "reason", ONE), "refused {{reason}}"),
                        (rate("twostroke_pin_expiries_total", "instance", ONE), "expired {{instance}}"),
                        (rate("twostroke_displaced_hints_total", "instance", ONE), "displaced {{instance}}"),
                    ],
                ),
            ],
        ),
        (
            "Tiers below the pages",
            [
                Panel(
                    "used share",
                    "percentunit",
                    [(f"twostroke_tier_bytes{ONE} / twostroke_tier_capacity_bytes{ONE}", "{{tier}} {{instance}}")],
                ),
                Panel(
                    "missing blocks found",
                    "percentunit",
                    [
                        (
                            f"{TIER_HITS} / ({TIER_HITS} + {rate('twostroke_tier_misses_total', 'tier', ONE)})",
                            "{{tier}}",
                        ),
                    ],
                ),
                Panel(
                    "seconds saved per second",
                    "none",
                    [(rate("twostroke_tier_saved_seconds_total", "tier", ONE), "{{tier}}")],
                ),
                Panel("written", "Bps", [(rate("twostroke_tier_written_bytes_total", "tier", ONE), "{{tier}}")]),
                Panel("seconds per page", "s", [(f"twostroke_tier_page_seconds{ONE}", "{{tier}} {{instance}}")]),
                Panel(
                    "loads not begun, given up",
                    "ops",
                    [
                        (rate("twostroke_tier_refused_loads_total", "tier", ONE), "not begun {{tier}}"),
                        (rate("twostroke_tier_given_up_loads_total", "tier", ONE), "given up {{tier}}"),
                    ],
                ),
                Panel(
                    "pages that left",
                    "ops",
                    [(rate("twostroke_tier_evicted_pages_total", "reason", ONE), "{{reason}}")],
                ),
                Panel("age when room was needed", "s", quantiles("twostroke_tier_eviction_age_seconds", "tier", ONE)),
            ],
        ),
        (
            "Trouble",
            [
                Panel(
                    "damaged, stale",
                    "none",
                    [
                        (f"twostroke_digest_mismatches_total{ONE}", "damaged {{instance}}"),
                        (f"twostroke_stale_epochs_total{ONE}", "stale lives {{instance}}"),
                        (f"twostroke_stale_attempts_total{ONE}", "stale attempts {{instance}}"),
                    ],
                ),
                Panel(
                    "pulls that failed", "ops", [(rate("twostroke_pull_failures_total", "reason", ONE), "{{reason}}")]
                ),
                Panel(
                    "checksums",
                    "percentunit",
                    [(rate("twostroke_digest_seconds_total", "instance", ONE), "{{instance}}")],
                    "Share of a core.",
                ),
            ],
        ),
    ],
    instances_of="twostroke_pages",
)
