"""Writes a rebase report for people: Markdown, the same text on a terminal and as a CI annotation."""

from __future__ import annotations

from vllm_series.rebase.model import Decision, Need, Outcome, Report, State

MEANING = {
    State.CLEAN: "applies at the recorded lines",
    State.OFFSET: "applies strictly, a few lines further",
    State.MERGED: "a 3-way merge took it; look at the result",
    State.UPSTREAMED: "upstream has it; it leaves the series and is listed in upstreamed.toml",
    State.UNREACHED: "it applies, but no DSA model runs this code any more",
    State.CONFLICT: "both sides changed the same lines",
    State.ANCHOR_LOST: "its function is gone, or the change landed outside of it",
    State.TARGET_GONE: "upstream removed the file",
    State.TARGET_RENAMED: "upstream moved the file",
}


def markdown(report: Report) -> str:
    """Return the report as Markdown."""
    old, new = report.old, report.new
    rows = [
        f"# Rebase {old['line']} -> {new['line']}",
        "",
        f"vLLM {old['version']} ({old['commit'][:12]}) to {new['version']} ({new['commit'][:12]}), "
        f"{len(report.outcomes)} patches, {report.seconds:.1f} s: {summary(report)}",
        "",
    ]
    if report.outcomes:
        rows += ["| patch | state | upstream's change of its files | settled |", "|---|---|---|---|"]
    for one in report.outcomes:
        targets = "<br>".join(_cell(target.text()) for target in one.targets)
        rows.append(f"| {one.patch} | {one.state} | {targets} | {_settled(one)} |")
    rows += [f"\nnote: {note}" for note in report.notes]
    if report.unproven:
        rows += ["", "## upstreamed.toml needs an edit", "", *(f"- {row}" for row in report.unproven)]
    for one in report.outcomes:
        if one.state is not State.CLEAN or one.notes:
            rows += ["", *_details(one)]
    return "\n".join(rows) + "\n"


def summary(report: Report) -> str:
    counts = ", ".join(f"{n} {state}" for state, n in report.counts().items()) or "no patches"
    if report.clean:
        return f"{counts}; nothing is left to decide"
    left = [f"{len(report.open)} to decide"] if report.open else []
    left += [f"{len(report.unproven)} entries of upstreamed.toml to mend"] if report.unproven else []
    return f"{counts}; {', '.join(left)}"


def _settled(one: Outcome) -> str:
    if one.decision is not Decision.NONE:
        return one.decision.value
    return {Need.ACCEPT: "look, then --accept", Need.PERSON: "needs an edit"}.get(one.need, "")


def _details(one: Outcome) -> list[str]:
    rows = [
        f"## {one.patch}: {one.state}",
        "",
        f"{MEANING[one.state]}." + (f" {one.detail}." if one.detail else ""),
    ]
    if one.hunks != (0, 0) and one.hunks[0] != one.hunks[1]:
        rows.append(f"\nHunks: {one.hunks[0]} before, {one.hunks[1]} now.")
    rows += [f"- {note}" for note in one.notes]
    for title, lines in (("Changes that are lost", one.lost), ("Changes that are new", one.gained)):
        if lines:
            rows += ["", f"{title}:", "", "```", *lines, "```"]
    for target in one.targets:
        if target.commits:
            rows += [
                "",
                f"Upstream's commits to {target.path}:",
                *(f"- {commit}" for commit in target.commits),
            ]
    return rows


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def stop(outcome: Outcome, new: str, tree: str, message: str) -> tuple[str, str]:
    """Return what happened and the exact commands to go on, for a run that stopped at ``outcome``."""
    name = outcome.patch
    what = f"{name}: {outcome.state}, {MEANING[outcome.state]}"
    if outcome.detail:
        what += f"\n  {outcome.detail}"
    what += "".join(f"\n  note: {note}" for note in outcome.notes)
    what += "".join(f"\n  lost: {line}" for line in outcome.lost)
    what += "".join(f"\n  new: {line}" for line in outcome.gained)
    go = f"series rebase --continue --to {new}"
    if outcome.need is Need.ACCEPT:
        first = [f"git -C {tree} show            # the result", f"{go} --accept {name}   # if it is right"]
        other = [f"edit the files in {tree}, then: {go}   # if it is not"]
    elif outcome.how == State.CONFLICT and outcome.state in {State.CONFLICT, State.ANCHOR_LOST}:
        first = [
            f"git -C {tree} diff            # the conflicts",
            f"edit the files in {tree}: no conflict marker may stay",
            go,
        ]
        other = []
    else:
        first = [f"make the change by hand in {tree}", go]
        other = []
    if outcome.state in {State.ANCHOR_LOST, State.TARGET_GONE, State.TARGET_RENAMED}:
        first.insert(-1, f"correct Anchor and Live-When in {message}")
    rest = [
        f"{go} --drop {name}   # to leave the patch out",
        f"series rebase --abort --to {new}   # to give up",
    ]
    return what, "\n       ".join([*first, *other, *rest])
