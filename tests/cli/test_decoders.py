"""`ligertune generate`: options of the features that decode."""

import pytest
from support.command_line import run_here

COMMAND = ("generate", "nowhere", "Once")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--draft-tokens", "4"], "--draft-tokens is an option of --draft, which is not given"),
        (["--medusa", "--draft-tokens", "4"], "--draft-tokens is an option of --draft, which is not given"),
        (["--acceptance", "typical"], "--acceptance is an option of --medusa, which is not given"),
        (["--medusa", "--draft", "head"], "--medusa and --draft decode in different ways"),
    ],
)
def test_options_without_their_decoder_and_two_decoders_are_refused(options, sentence, tmp_path):
    done = run_here(*COMMAND, *options, cwd=tmp_path)
    assert done.code == 2
    assert sentence in " ".join(done.err.split())
