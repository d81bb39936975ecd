"""A reader's own text, typed into the first page and read by a trained model; `make test-model` runs this."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from avow.integrations.transformers.model_files import load_unpacked
from avow.integrations.transformers.reading import next_without_word
from avow.lab.pages.reading import MODEL
from tests.helpers.lab import Lab, running
from tests.helpers.lab_visits import Opener
from tests.test_trained_model import FOLDER

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]

STORY = (
    "The captain of the ship was called Morgan, and the cook was called Bellamy. Every morning Bellamy baked bread for "
    "the crew, and every morning Morgan walked along the deck and looked at the sky. In the third week there was a "
    "storm. The waves were as high as the mast, and everybody held on to whatever they could find. When it was over, "
    "nobody was hurt, but there was no flour left on the ship. So the captain went down to see the cook, whose name was"
)
GREY = "() => document.querySelectorAll('#text .gone').length"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab whose model is not unpacked yet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MODEL, str(FOLDER))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with running() as found:
            yield found


def test_a_typed_text_is_read_after_one_button_and_any_word_of_it_can_ask(visit: Opener) -> None:
    page = visit("").page
    page.click("#own-text")
    page.wait_for_selector("#load:visible")
    assert page.is_disabled("#typed")
    page.click("#load")
    page.wait_for_function(
        "() => /^(unpacking|loading) the model.* s\\)$/.test(document.getElementById('model-says').textContent)"
    )
    page.wait_for_function("() => !document.getElementById('typed').disabled")
    page.fill("#typed", STORY)
    page.wait_for_selector("#text.live")

    # The page's next words are the model's own.
    loaded = load_unpacked(str(FOLDER))
    ids = [loaded.tokenizer.bos_token_id, *loaded.tokenizer(STORY, add_special_tokens=False).input_ids]
    with torch.no_grad():
        chances = loaded.model(torch.tensor([ids])).logits[0, -1].softmax(-1)
    best = int(chances.argmax())
    assert page.locator("#text .word").count() == len(ids)
    assert page.inner_text("#slot") == loaded.tokenizer.decode([best]).strip()
    shown = float(page.inner_text("#next li span.exact").rstrip("%")) / 100
    assert shown == pytest.approx(float(chances[best]), abs=0.006)

    # The slider greys words of this text, and says so; the slider stays where it is while another word asks.
    assert page.evaluate(GREY) == 0
    page.focus("#tolerance")
    page.keyboard.press("End")
    page.fill("#search", "induction")
    page.press("#search", "Enter")
    assert page.evaluate(GREY) > 20
    assert page.inner_text("#sentence").startswith("Proved of all heads: ") and page.inner_text("#broken") == "0"
    page.click("#text [data-t='90']")
    page.wait_for_function("() => document.querySelector('#text .asking').dataset.t === '90'")
    assert page.locator("#text .later").count() == len(ids) - 91
    assert page.inner_text("#stop") == "30%" and page.inner_text("#broken") == "0"

    # A word that is crossed out is read by nobody, and the next words are the model's without it.
    page.click("#slot")
    page.wait_for_function("() => document.querySelector('#text .later') === null")
    name = [loaded.tokenizer.decode([i]) for i in ids].index(" Bell")
    ((word, chance), *_) = next_without_word(loaded.model, loaded.tokenizer, STORY, len(ids) - 1, name)
    page.click("#cross")
    page.click(f"#text [data-t='{name}']")
    page.wait_for_selector("#text .crossed")
    assert page.inner_text("#sentence").startswith("Tried without “Bellamy”: the next word")
    assert page.inner_text("#slot") == word.strip() and page.inner_text("#near") == "without it"
    shown = float(page.inner_text("#next .best span.near").rstrip("%")) / 100
    assert shown == pytest.approx(chance, abs=0.006)


def test_a_text_that_is_too_short_says_so(visit: Opener) -> None:
    page = visit("").page
    page.click("#own-text")
    page.wait_for_function("() => !document.getElementById('typed').disabled")
    page.fill("#typed", "The cat sat on the")
    page.wait_for_selector("#text.live")
    page.focus("#tolerance")
    page.keyboard.press("End")
    assert "This text is too short to skip anything" in page.inner_text("#sentence")
    assert page.evaluate(GREY) == 0
