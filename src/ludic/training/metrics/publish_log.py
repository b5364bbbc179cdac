"""What a publish reports, for the log: servers that it lost are named once, figures are kept."""

from __future__ import annotations

import logging

from ludic.distributed.interfaces import PublishReport

_log = logging.getLogger("ludic.training")
_FIGURES = {"stall_s": "perf/publish_stall_s", "canary_max": "perf/publish_canary_max"}


class PublishLog:
    """Warns of every server that goes out of rotation, and says when it is back."""

    def __init__(self) -> None:
        self._lost: dict[str, str] = {}

    def take(self, report: PublishReport | None) -> dict[str, float]:
        """The report's figures under their metrics' names; a publisher may have none to give."""
        if report is None:
            return {}
        details = report.details
        lost = {str(url): str(why) for url, why in dict(details.get("lost", {})).items()}
        for url in lost.keys() - self._lost.keys():
            _log.warning(
                "version %d is without %s, which is out of rotation: %s. The next publish tries it "
                "again",
                report.version,
                url,
                lost[url],
            )
        for url in self._lost.keys() - lost.keys():
            _log.warning("version %d: %s is back in rotation", report.version, url)
        self._lost = lost
        figures = {name: float(details[key]) for key, name in _FIGURES.items() if key in details}
        return figures | ({"perf/servers_lost": float(len(lost))} if "lost" in details else {})
