"""`python -m tests.trials.chaos.pods.run OVERLAY`: an overlay's pods on this machine, a request, an eviction, a dead
launcher.

Prints one line of JSON: seconds until every pod was ready, what preStop said, and what was answered. Runs itself in
namespaces of its own, so that nothing of it is left behind. Needs root, iproute2, util-linux and kubectl.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.deploy.tools import HOW_TO_GET, find_tool
from tests.hand_cut import HandCut
from tests.trials.chaos.pods.kubelet import Kubelet
from tests.trials.chaos.pods.manifests import Manifests
from tests.trials.chaos.pods.pod import Image, Pod, network

ROOT = Path(__file__).parents[4]
OVERLAYS = ROOT / "deploy/k8s/overlays"
APART = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c"]
PREPARE = "mount --make-rprivate / && mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns"
PROGRAMS = ("ip", "unshare", "nsenter", "setpriv", "kubectl")
MODEL = "smollm2-135m"
PACED = "paced:prefill_tokens_per_s=20000,step_ms=20,step_us_per_seq=0,vocab=256,page_bytes=4096,max_model_len=4096"
READY_S, SOON_S = 420.0, 240.0
TOKENS = 400


def run(overlay: str, model: str) -> dict[str, Any]:
    network()
    with tempfile.TemporaryDirectory(prefix="pods-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
        folder.chmod(0o755)
        kubelet = Kubelet(
            Manifests.render(OVERLAYS / overlay, {f" {MODEL}": f" {model}", f"={MODEL}": f"={model}"}), _image(), folder
        )
        try:
            with kubelet.running():
                return _tried(kubelet)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


def _tried(kubelet: Kubelet) -> dict[str, Any]:
    ready_s = kubelet.until(lambda: _all_ready(kubelet), "every pod is ready", READY_S)
    routers = [pod for name, pod in kubelet.pods.items() if "router" in name]
    text = "".join(_stream(routers[0], TOKENS))
    stream = _Reading(routers[0])
    end_s, said = kubelet.delete("twostroke-decode-0")
    kubelet.create("twostroke-decode-2", "twostroke-decode-0")
    back_s = kubelet.until(lambda: _all_ready(kubelet), "the evicted pod's successor is ready", SOON_S)
    stream.thread.join(SOON_S)
    launcher = kubelet.pods["twostroke-head"].containers[0]
    kubelet.pods["twostroke-head"].signal(launcher, signal.SIGKILL)
    kubelet.until(lambda: launcher.starts > 1 and launcher.is_running, "the launcher runs again", SOON_S)
    taken_over_s = kubelet.until(lambda: _took_over(kubelet), "it has taken the fleet over", SOON_S)
    again = "".join(_stream(routers[1], TOKENS))
    return {
        "ready_s": round(ready_s, 1),
        "eviction_s": round(end_s, 1),
        "successor_s": round(back_s, 1),
        "launcher_s": round(taken_over_s, 1),
        "pre_stop": said,
        "moved_stream_is_the_same": "".join(stream.pieces) == text,
        "answer_after_all_is_the_same": again == text,
        "kept_running": sum(container.starts == 1 for pod in kubelet.pods.values() for container in pod.containers),
    }


def _all_ready(kubelet: Kubelet) -> bool:
    return all(kubelet.is_ready(pod) for pod in kubelet.pods.values())


def _took_over(kubelet: Kubelet) -> bool:
    return "adopting it" in kubelet.pods["twostroke-head"].log_of("launcher").read_text()


def _stream(router: Pod, tokens: int) -> Iterator[str]:
    body = {
        "model": _model(router),
        "prompt": "Once",
        "max_tokens": tokens,
        "stream": True,
        "temperature": 0,
        "seed": 1,
    }
    request = urllib.request.Request(
        f"http://{router.address}:8000/v1/completions",
        json.dumps(body | {"ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=READY_S) as answer:
        reader = HandCut()
        for line in answer:
            for message in reader.feed(line):
                yield message["choices"][0]["text"]


def _model(router: Pod) -> str:
    with urllib.request.urlopen(f"http://{router.address}:8000/v1/models", timeout=SOON_S) as answer:
        return str(json.load(answer)["data"][0]["id"])


class _Reading:
    """A stream under way; made once its first piece has come."""

    def __init__(self, router: Pod) -> None:
        self.pieces: list[str] = []
        self.thread = threading.Thread(target=self._read, args=(router,), daemon=True)
        self.thread.start()
        while not self.pieces and self.thread.is_alive():
            time.sleep(0.01)

    def _read(self, router: Pod) -> None:
        for piece in _stream(router, TOKENS):
            self.pieces.append(piece)


def _image() -> Image:
    """This machine's root has what the image has: Python with our packages, and the model in a cache."""
    cache = Path("~/.cache/twostroke").expanduser()
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TWOSTROKE_CACHE": "/opt/twostroke/cache",
    }
    return Image(environment, {"/opt/twostroke/cache": cache}, needed())


def needed() -> list[Path]:
    """Folders that hold the containers' programs. A checkout may lie below a folder where pods have a volume."""
    found = [ROOT, *map(Path, (sys.prefix, sys.base_prefix)), *(Path(each) for each in sys.path if Path(each).is_dir())]
    apart = dict.fromkeys(each.resolve() for each in found)
    return [each for each in apart if not any(each != other and each.is_relative_to(other) for other in apart)]


def obstacle() -> str | None:
    """Why pods cannot be run here, and what to do about it; None where they can."""
    if os.geteuid() != 0:
        return "it needs root, for namespaces and mounts"
    for name in PROGRAMS:
        if find_tool(name) is None:
            return f"{name} is missing: get it with {HOW_TO_GET.get(name, 'Debian packages iproute2 and util-linux')}"
    for folder in needed():
        # Root's own folder is opened in each pod, and what is above a folder below /tmp is made anew there.
        above_it = [] if folder.is_relative_to("/tmp") else [each for each in folder.parents if each != Path("/root")]
        for above in (folder, *above_it):
            if not above.stat().st_mode & 0o001:
                return f"{above} is closed to the pods' user: open it with `chmod o+x {above}`, or use another checkout"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.trials.chaos.pods.run", description=__doc__)
    parser.add_argument("overlay", help="a folder of deploy/k8s/overlays, such as dev-cpu")
    parser.add_argument("model", nargs="?", default=PACED, help="as `serve --model` (default: %(default)s)")
    wanted = parser.parse_args()
    overlay, model = wanted.overlay, wanted.model
    if (why := obstacle()) is not None:
        print(f"make pods: {why}", file=sys.stderr)
        return 2
    if os.environ.get("PODS_APART") != "1":
        again = [sys.executable, "-m", "tests.trials.chaos.pods.run", overlay, model]
        command = [*APART, f'{PREPARE} && exec "$@"', "pods", *again]
        return subprocess.run(command, cwd=ROOT, env=os.environ | {"PODS_APART": "1"}, check=False).returncode
    print(json.dumps(run(overlay, model)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
