"""The pictures of the examples' pages: `python docs/pictures/pages.py` (Chromium)

Trains each example on two ranks, about a minute in all, makes its page, and takes docs/images/page-NAME-light.png and
page-NAME-dark.png: the top of the page.
"""

import base64
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from browser import Browser  # noqa: E402

EXAMPLES = {
    "images": ("images/train.py", "--epochs", "3", "--images", "1000", "--out", "runs/images"),
    "gan": ("gan/train.py", "--steps", "300", "--out", "runs/gan"),
    "finetune": ("finetune/train.py", "--steps", "60", "--out", "runs/finetune"),
}
WIDTH, HEIGHT, SCALE = 1100, 770, 0.6  # of the window; of a picture's pixels to it


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder) / "profile") as browser:
        for name, (script, *options) in EXAMPLES.items():
            torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
            subprocess.run((*torchrun, str(ROOT / "examples" / script), *options), cwd=folder, check=True)
            report = (sys.executable, "-m", "paceline", "report", f"runs/{name}", "--out", f"{name}.html")
            subprocess.run(report, cwd=folder, check=True)
            for scheme in ("light", "dark"):
                address = (Path(folder) / f"{name}.html").as_uri()
                page = browser.open(address, width=WIDTH, height=HEIGHT, is_dark=scheme == "dark")
                page.wait_for("document.documentElement.dataset.drawn")
                page.call("Emulation.setDeviceMetricsOverride", **page.size | {"deviceScaleFactor": SCALE})
                shot = page.call("Page.captureScreenshot", format="png")["data"]
                (ROOT / "docs" / "images" / f"page-{name}-{scheme}.png").write_bytes(base64.b64decode(shot))


if __name__ == "__main__":
    main()
