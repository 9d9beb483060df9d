"""Answers questions about pictures with a verified bundle (`network`); the rules of refusal are `pictures.answer`'s."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgefl_client.scoring.explanation import Explanation
from edgefl_client.scoring.network import Network, Photo
from edgefl_protocol.bundle import Bundle
from edgefl_protocol.bundle.card_words import shown_weaknesses
from edgefl_protocol.bundle.figures import learned_from, learned_from_federation
from edgefl_protocol.bundle.model_card import referral_rules
from edgefl_protocol.bundle.question_words import kept_from_learning, measured, why_no_map
from edgefl_protocol.bundle.shown_map import how_true, level_words
from edgefl_protocol.errors import BundleError
from edgefl_protocol.payload import digest
from edgefl_protocol.pictures.answer import AnswerRules, PictureAnswer, ReadQuestion, make_answer, read_question
from edgefl_protocol.pictures.light import Light
from edgefl_protocol.pictures.quality import faults_of_any_picture, light_at_scale
from edgefl_protocol.pictures.score import ModelInfo
from edgefl_protocol.rules.hidden_regions import marks_nothing
from edgefl_protocol.rules.questions import known_words


@dataclass(frozen=True)
class AskedPicture:
    """A picture that is ready for the network."""

    pixels: NDArray[np.uint8]  # (S, S, 3), the network's input
    faults: tuple[str, ...]  # of the photograph, of `quality.faults_of_any_picture`
    milliseconds: float  # what this took
    transparent: bool = False  # whether parts of the photograph were
    light: Light | None = None  # of the photograph; None where nobody measured it


class Asker:
    """Answers questions about pictures with one bundle.

    Args:
        threads: threads of one run; None for the processors this process may use.
        clock: gives Unix milliseconds; an asker that outlives its bundle refuses everything.

    Raises:
        BundleError: it answers no questions (`other_kind`), or the runtime cannot run it.
        ValueError: `threads` is out of range.
    """

    def __init__(self, bundle: Bundle, threads: int | None = None, clock: Callable[[], int] | None = None) -> None:
        if bundle.questions is None:
            raise BundleError(
                "this bundle scores pictures and answers no questions: score one with edgefl score IMAGE", "other_kind"
            )
        self.questions = bundle.questions
        self._taught = bundle.questions.taught_words
        self.network = Network(bundle, threads, None, clock)
        self._rules = AnswerRules(
            answers=bundle.labels.classes,
            seen=bundle.labels.seen,
            unsure_above=bundle.card.refer_above,
            measured=measured(bundle.questions),
            learned_from=learned_from(bundle.card),
            light=referral_rules(bundle.labels, bundle.card).light,
        )
        self.model = ModelInfo(
            id=bundle.id,
            sha256=bundle.sha256,
            version=bundle.manifest.version,
            state_kind="bundle",
            state_sha256=digest(bundle.weights),
            better_than_chance=bundle.questions.looks,
            warnings=shown_weaknesses(bundle.card, bundle.labels, bundle.questions),
            learned_from_federation=learned_from_federation(bundle.card),
        )

    @property
    def how_right(self) -> str:
        """How the model did on questions kept from learning, in a sentence that goes with every answer."""
        said = kept_from_learning(self.questions)
        return f"{said[0].upper()}{said[1:]}."

    @property
    def a_question(self) -> str:
        """A question of one word that the model was taught, to try it with; empty where no question could hold one."""
        table = self.questions.vocabulary.table
        taught = table if self._taught is None else [word for word in table if word in self._taught]
        return next((word for word in (*taught, *table) if known_words(word, table)), "")

    def ask(self, image: Photo, question: str, name: str | None = None) -> PictureAnswer:
        """Answer one question about one picture.

        Args:
            image: bytes of a JPEG or PNG, a Pillow image, or upright uint8 pixels (H, W, 3).

        Raises:
            ImageError: the picture cannot be used; `code` says why.
            QuestionError: the question is too long, or has no word.
            ScoreError: the network gave no finite numbers.
        """
        return self.ask_prepared(self.prepare(image), question, name)

    def prepare(self, image: Photo) -> AskedPicture:
        """Make the network's input of a picture."""
        started = time.perf_counter()
        photo, pixels = self.network.prepared(image)
        faults = faults_of_any_picture(photo.pixels.shape, self.network.least_px, photo.white)
        light = light_at_scale(photo.pixels, self.network.bundle.preprocess.colour)
        return AskedPicture(pixels, faults, (time.perf_counter() - started) * 1e3, photo.transparent, light)

    def read(self, question: str) -> ReadQuestion:
        """Turn a question into what the network reads.

        Raises:
            QuestionError: it is too long, or has no word.
        """
        return read_question(question, self.questions.vocabulary, self._taught)

    def ask_prepared(self, picture: AskedPicture, question: str, name: str | None = None) -> PictureAnswer:
        """Answer one question about what `prepare` made; the network is not run where no word is known."""
        started = time.perf_counter()
        read = self.read(question)
        found = self.network.run(picture.pixels[None], read.tokens) if read.known else None
        return make_answer(
            None if found is None else {key: values[0] for key, values in found.items()},
            self._rules,
            read,
            name=name,
            faults=picture.faults,
            expired=self.network.expired,
            model=self.model,
            milliseconds=picture.milliseconds + (time.perf_counter() - started) * 1e3,
            transparent=picture.transparent,
            light=picture.light,
        )

    def explain(self, picture: AskedPicture, answer: PictureAnswer) -> Explanation:
        """Make the map of where it looked, where the bundle found that it looks and how true the map is."""
        said = self.network.bundle.card.map
        why_not = why_no_map(said, self.questions)
        if said is None or why_not is not None:
            return Explanation(None, why_not or how_true(said, "question"))
        if answer.answer is None:
            return Explanation(None, "No map is drawn: there is no answer that it could explain.")
        values, fall, without = answer.map, None, None
        if said.kind == "occlusion":
            label = self._rules.answers.index(answer.answer)
            likely = answer.probabilities[answer.answer]
            values, without = self.network.occlusion(
                picture.pixels, label, likely, said.passes - 1, answer.question.tokens
            )
            fall = likely - without
        if values is not None and marks_nothing(values, fall):
            return Explanation(None, level_words(said))
        return Explanation(values, how_true(said, "question"), without)
