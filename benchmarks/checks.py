"""The benchmarks of a single check: against an earlier commit, its own shortcuts and efforts, the floor, the loop by hand, and its size."""

from __future__ import annotations

from importlib.metadata import version

from benchmarks.children import ROOT, Child
from benchmarks.earlier import library_of
from benchmarks.figures import Ratio, Result, Series, ratio, refusals
from benchmarks.plan import SHORT, Plan, disagreements, result

DEFAULT = "default"
LAYERS = (2, 4, 8, 16, 32)
DEPTHS = (1, 2, 3, 4)
EVERY_CASE = 1000


def checking(plan: Plan, label: str, subject: str, **settings: object) -> Child:
    """One check of a subject in a process of its own."""
    return Child.task(label, "check", plan.folder, subject=subject, settings=settings)


def before(plan: Plan) -> Result:
    """Effort default and quick against the check of an earlier commit."""
    ratios: list[Ratio | None] = []
    notes: list[str] = []
    with library_of(plan.against) as library:
        for subject in plan.subjects:
            earlier = Child.task(plan.against, "check", plan.folder, library, subject=subject, settings={})
            quick = checking(plan, "quick", subject, effort="quick")
            samples = plan.measure(earlier, checking(plan, DEFAULT, subject), quick, times=SHORT.get(subject, 1))
            ratios += [ratio(subject, samples, label, plan.against) for label in (DEFAULT, "quick")]
            notes += [*refusals(samples), *disagreements(subject, samples, "verdict")]
    return result("before", ratios, notes=notes)


def shortcuts(plan: Plan) -> Result:
    """The shortcuts of the engine, on and off."""
    ratios: list[Ratio | None] = []
    notes: list[str] = []
    for subject in plan.subjects:
        if subject != "lm_step":  # minutes a round, and the smaller ones tell the same
            sides = [checking(plan, f"shortcuts {which}", subject, shortcuts=which) for which in ("on", "off")]
            samples = plan.measure(*sides, times=SHORT.get(subject, 1))
            ratios.append(ratio(subject, samples, "shortcuts on", "shortcuts off"))
            notes += [*refusals(samples), *disagreements(subject, samples, "verdict")]
    return result("shortcuts", ratios, notes=notes)


def efforts(plan: Plan) -> Result:
    """What effort quick saves and effort thorough costs, against the default."""
    ratios: list[Ratio | None] = []
    notes: list[str] = []
    for subject in plan.subjects:
        sides = [checking(plan, effort, subject, effort=effort) for effort in (DEFAULT, "quick", "thorough")]
        samples = plan.measure(*sides, times=SHORT.get(subject, 1))
        ratios += [ratio(subject, samples, effort, DEFAULT) for effort in ("quick", "thorough")]
        notes += [*refusals(samples), *disagreements(subject, samples, "verdict")]
    return result("efforts", ratios, notes=notes)


def floor(plan: Plan) -> Result:
    """A bare loop of trace, lower, compile and run over the same nestings."""
    return without_the_plugin(plan, "floor")


def by_hand(plan: Plan) -> Result:
    """What one writes by hand: two calls under `jax.checking_leaks`, memory read, pointers compared."""
    return without_the_plugin(plan, "by_hand")


def without_the_plugin(plan: Plan, way: str) -> Result:
    """The default check against a loop over the nestings that it ran."""
    ratios: list[Ratio | None] = []
    notes: list[str] = []
    for subject in plan.subjects:
        nestings = str(plan.new_folder() / "nestings.json")
        ours = Child.task(DEFAULT, "check", plan.folder, subject=subject, settings={}, nestings=nestings)
        theirs = Child.task(way, "loop", plan.folder, way=way, subject=subject, nestings=nestings)
        samples = plan.measure(ours, theirs, times=SHORT.get(subject, 1))
        ratios.append(ratio(subject, samples, DEFAULT, way))
        notes += [*disagreements(subject, samples, "nestings"), *disagreements(subject, samples, "raised")]
    return result(way, ratios, notes=notes)


def first_failure(plan: Plan) -> Result:
    """Seconds until the first failure, summed over the leaks and reports, against an earlier commit."""
    cases = 2 if plan.quick else EVERY_CASE
    with library_of(plan.against) as library:
        sides = {plan.against: library, DEFAULT: ROOT}
        children = [
            Child.task(label, "first_failure", plan.folder, where, cases=cases) for label, where in sides.items()
        ]
        samples = plan.measure(*children)
    case = f"{len(samples[DEFAULT][0].facts['failed'])} that fail"
    return result(
        "first_failure",
        [ratio(case, samples, DEFAULT, plan.against)],
        notes=disagreements("corpus", samples, "failed"),
    )


def size(plan: Plan) -> Result:
    """Seconds against layers and depth, and a model of 7 billion parameters against the same program with narrow arrays."""
    layers = LAYERS[:2] if plan.quick else LAYERS
    depths = DEPTHS[:2] if plan.quick else DEPTHS
    series = [growth(plan, kind, layers) for kind in ("scanned", "unrolled")]
    subject = "linear" if plan.quick else "block"
    runs = {str(depth): checking(plan, str(depth), subject, max_depth=depth) for depth in depths}
    seconds = [tuple(sample.cpu for sample in side) for side in plan.measure(*runs.values()).values()]
    series.append(Series(subject, "max_depth", depths, tuple(seconds)))
    reported, notes = report_4871(plan)
    return result("size", [width(plan)], [*series, *reported], notes)


def growth(plan: Plan, kind: str, layers: tuple[int, ...]) -> Series:
    """Seconds against the layers of a model."""
    samples = plan.measure(*(checking(plan, str(number), f"{kind} {number}") for number in layers))
    return Series(kind, "layers", layers, tuple(tuple(sample.cpu for sample in side) for side in samples.values()))


def width(plan: Plan) -> Ratio | None:
    """7 billion parameters, abstract, over the same layers at a thousandth of the width."""
    wide, narrow = "7 billion parameters", "a thousandth of the width"
    samples = plan.measure(*(checking(plan, name, name, styles="argument,functional") for name in (wide, narrow)))
    return ratio("language model", samples, wide, narrow)


def report_4871(plan: Plan) -> tuple[list[Series], list[str]]:
    """google/flax#4871 at its real size, where flax takes the program."""
    if not version("flax").startswith("0.10.2"):
        return [], ["google/flax#4871 at 20 GB is left out, this flax refuses the program"]
    settings = {"transforms": "jit", "sweep": "singles", "max_examples": 0, "memory_budget": "25GB"}
    samples = plan.measure(checking(plan, DEFAULT, "flax#4871", **settings))
    return [Series("google/flax#4871", "GB", (20,), (tuple(sample.cpu for sample in samples[DEFAULT]),))], []
