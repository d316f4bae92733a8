"""InfiniteBench's metrics on vectors worked out by hand."""

import pytest

from tests.lab.eval.metrics.vectors import check

OPTION = ("Georgie", "B")
FUNCTION = ("cmd_gen", "C")


@pytest.mark.parametrize(
    ("metric", "prediction", "references", "score"),
    [
        ("first_integer", "The pass key is 71432. 5", ("71432",), 1),
        ("first_integer", "none", ("71432",), 0),
        ("word", 'It is: "c14c-b8".', ("c14c-b8",), 1),
        ("word", "c14c-b8x", ("c14c-b8",), 0),
        ("speaker", "It was Ace.", ("ACE", "ACE ROTHSTEIN"), 1),
        ("speaker", "Rothstein", ("ACE", "ACE ROTHSTEIN"), 0),  # the first name alone counts
        ("last_integer", "So f(2) = `-7`.", ("-7",), 1),
        ("last_integer", "it is seven", ("7",), 0),
        ("first_number", "about 3.5 or 4", ("3.5",), 1),
        ("first_number", "88", ("88",), 1),
        ("first_number", "88.0", ("88",), 0),
        ("running_values", "[3, 1, 9, 4]", ("3", "1", "2", "4"), 1 / 2),  # up to the first that is wrong
        ("running_values", "-3", ("-3",), 0),  # signs are not read
        ("running_values_after_first", "8, 3, 1", ("3", "1"), 1),
        ("option", "B. Walking", OPTION, 1),
        ("option", "Georgie", OPTION, 1),
        ("option", "I think the answer is: B", OPTION, 1),
        ("option", "the answer is A or B", OPTION, 0),
        ("option", "perhaps D or B", OPTION, 0),  # the first letter that stands alone
        ("option", "", OPTION, 0),
        ("buggy_function", "C: cmd_gen", FUNCTION, 1),
        ("buggy_function", "The correct option is: cmd_gen", FUNCTION, 1),
        ("buggy_function", "cmd_gen", FUNCTION, 0),
    ],
)
def test_scores(metric: str, prediction: str, references: tuple[str, ...], score: float) -> None:
    check(f"infinitebench.{metric}", prediction, references, score)
