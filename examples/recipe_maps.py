"""Where the models look that examples/recipe.py has trained on ``lesions``, as pictures and as figures.

    python examples/recipe_maps.py runs/recipe runs/maps --seeds 41 42 43 44 45 --models psa local gtp abmil

- OUT/recipe-lesion-small, -median and -large, PNG and SVG: a slide each of the first seed, with a map for every model
  and the tiles of the lesion outlined. The slides are not chosen by what models make of them: of the test part, those
  whose number of tiles of lesion is at the quartiles. OUT/recipe-lesion.csv: the scores of their tiles.
- OUT/in_tissue.csv: patch AUC and tile FROC of all tiles, and of those of the largest piece of tissue. Outlines of
  lesions are those of real slides, laid over drawn tissue: parts of them lie apart from it. All that surrounds a tile
  there is lesion, so that it is easier to tell than one that lies in tissue.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from rich.progress import track

from psamil import find_bags, open_bag
from psamil.cohort.tile_labels import TileLabels
from psamil.evaluation import ScoredSlide, patch_auc, tile_froc
from psamil.evaluation.lesions import label_lesions
from psamil.evaluation.predictor import Member, Predictor
from psamil.evaluation.run_comparison import FinishedRun
from psamil.report.cases import RunOnSlides
from psamil.report.paper_figures.maps import draw_maps


def largest_piece(slide: ScoredSlide) -> ScoredSlide:
    """The tiles of the largest group of tiles that touch."""
    pieces = label_lesions(slide.xy, np.ones(len(slide.xy), dtype=bool))
    kept = pieces == np.bincount(pieces).argmax()
    return ScoredSlide(slide.xy[kept], slide.scores[kept], slide.positive[kept])


def localisation(tested: RunOnSlides, labels: TileLabels) -> dict[str, float]:
    """Of the test slides: of all tiles, and of the largest piece of tissue."""
    whole = []
    predictor = Predictor([Member.load(path) for path in tested.models(next(iter(tested.refs)))])
    for ref in track(tested.refs.values(), f"{tested.run.path.parent.name} {tested.run.name}"):
        bag = open_bag(ref, **tested.reading)
        scores = predictor.predict(bag).tile_scores.double().numpy()
        whole.append(ScoredSlide(bag.xy.double().numpy(), scores, labels.of_slide(ref, bag.n)))
    tissue = [largest_piece(slide) for slide in whole]
    positive = [sum(int(slide.positive.sum()) for slide in slides) for slides in (whole, tissue)]
    return {
        **{"lesion_tiles": positive[0], "in_tissue": positive[1]},
        **{"patch_auc": patch_auc(whole), "froc_tile@6": tile_froc(whole).score()},
        **{"patch_auc_in_tissue": patch_auc(tissue), "froc_tile@6_in_tissue": tile_froc(tissue).score()},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder that examples/recipe.py has written")
    parser.add_argument("out", type=Path, help="folder of what is written")
    parser.add_argument("--seeds", type=int, nargs="+", default=[41], help="of the slides")
    parser.add_argument("--models", nargs="+", default=["psa", "local", "gtp", "abmil"], metavar="NAME")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # tensors this small are fastest on one thread
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed in arguments.seeds:
        cohort = arguments.runs / "cohorts" / f"lesions-{seed}"
        bags, labels = find_bags(cohort).bags, TileLabels.open(cohort / "tiles")
        folders = [arguments.runs / f"lesions-{seed}" / name for name in arguments.models]
        tested = [RunOnSlides.of(FinishedRun.load(folder), bags) for folder in folders]
        if seed == arguments.seeds[0]:
            named = {folder.name: folder for folder in folders}
            draw_maps(named, arguments.out, features=cohort, tile_labels=cohort / "tiles", name="recipe-lesion")
        for run in tested:
            rows.append({"seed": seed, "model": run.run.name, **localisation(run, labels)})
            pd.DataFrame(rows).to_csv(arguments.out / "in_tissue.csv", index=False)
    Console().print(pd.DataFrame(rows).drop(columns="seed").groupby("model").mean().round(3).to_string())
