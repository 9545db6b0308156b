"""Squares of tiles: against a dictionary of cells."""

import pytest
import torch

from psamil.models.scales import squares_of, tree_pairs


def example(shift: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    xy = torch.randint(0, 9, (60, 2), generator=generator).double() + 5
    return xy + shift, torch.tensor([0, 25, 25, 60])


@pytest.mark.parametrize("side", [1, 2, 4])
@pytest.mark.parametrize("shift", [0.0, -1000.3])
def test_against_a_dictionary_of_cells(side: int, shift: float) -> None:
    xy, slides = example(shift)
    squares = squares_of(xy, slides, side)
    values = torch.randn(60, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cells: dict[tuple[int, int, int], list[int]] = {}
    for slide, (first, end) in enumerate([(0, 25), (25, 25), (25, 60)]):
        for tile in range(first, end):
            column, row = ((xy[tile] - xy[first:end].amin(0)) / side + 1e-4).floor().int().tolist()
            cells.setdefault((slide, row, column), []).append(tile)
    assert len(squares) == len(cells)
    means = squares.mean(values)
    for square, (slide, row, column) in enumerate(sorted(cells)):
        members = cells[slide, row, column]
        assert (squares.of_tile == square).nonzero().flatten().tolist() == members
        assert squares.cell[square].tolist() == [column, row]
        assert squares.slides[slide] <= square < squares.slides[slide + 1]
        torch.testing.assert_close(means[square], values[members].mean(0))
    slide_of_tile = torch.repeat_interleave(slides.diff())
    assert squares.of_any_tile(slide_of_tile).tolist() == [slide for slide, _, _ in sorted(cells)]


def test_rounding_does_not_move_a_tile() -> None:
    xy = torch.tensor([[0.0, 0.0], [1.99999, 0.0], [2.00001, 0.0], [1.5, 0.0]])
    assert squares_of(xy, torch.tensor([0, 4]), 2).of_tile.tolist() == [0, 1, 1, 0]


def test_no_tiles() -> None:
    squares = squares_of(torch.zeros(0, 2), torch.tensor([0, 0, 0]), 2)
    assert len(squares) == 0
    assert squares.slides.tolist() == [0, 0, 0]
    assert squares.mean(torch.zeros(0, 3)).shape == (0, 3)


def test_pairs_of_a_tree() -> None:
    pairs = tree_pairs(torch.tensor([1, 0, 1]), first_child=2)
    assert {(int(i), int(j)) for i, j in pairs.T} == {(2, 1), (3, 0), (4, 1), (1, 2), (0, 3), (1, 4)}
