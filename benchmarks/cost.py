"""The cost figure over models that were compared: score against FLOPs of a training batch, by size.

    python benchmarks/cost.py runs/all/camelyon-11/comparison --title "Metastases among decoys"

The folder is that of ``psamil compare --study``, or any other with run directories in it; results/figure-cost.png, .svg
and .csv are written. FLOPs are counted on one slide of 5,000 tiles, forward and backward, and taken times 8. The count
of psa must agree with the formulas within 2 %.
"""

import argparse
import csv
from pathlib import Path

import torch
from loading import claim

from psamil.evaluation.run_folder import RUN_FILE
from psamil.report.paper_figures.cost import BATCH_SLIDES, TILES, draw_cost

MOST_OFF_PERCENT = 2.0

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder of run directories")
    parser.add_argument("--tiles", type=int, default=TILES)
    parser.add_argument("--slides", type=int, default=BATCH_SLIDES)
    parser.add_argument("--title", default="")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs = {path.parent.name: path.parent for path in sorted(arguments.runs.glob(f"*/{RUN_FILE}"))}
    sizes = {"tiles": arguments.tiles, "batch_slides": arguments.slides}
    *_, table = draw_cost(runs, arguments.out, **sizes, title=arguments.title)
    with open(table, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    print(f"| model | {rows[0]['metric']} | FLOPs per batch | parameters |\n|---|---|---|---|")
    for row in sorted(rows, key=lambda row: float(row["flops_per_batch"])):
        flops = float(row["flops_per_batch"])
        print(f"| `{row['run']}` | {float(row['score']):.3f} | {flops:.2e} | {int(row['parameters']):,} |")
    for row in rows:
        if row["flops_by_formula"]:
            off_percent = 100 * abs(float(row["flops_per_batch"]) / float(row["flops_by_formula"]) - 1)
            claim(f"{row['run']}: % off the formula", off_percent, "<=", MOST_OFF_PERCENT)
