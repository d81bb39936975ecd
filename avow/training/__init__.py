"""From a corpus to a trained model: documents and questions, batches, configuration, loop and checkpoints."""

from avow.training.batches import Batches as Batches
from avow.training.batches import Mixture as Mixture
from avow.training.config import TrainConfig as TrainConfig
from avow.training.config import read_config as read_config
from avow.training.corpus import Corpus as Corpus
from avow.training.corpus import Question as Question
from avow.training.corpus import read_corpus as read_corpus
from avow.training.corpus import read_documents as read_documents
from avow.training.corpus import read_questions as read_questions
from avow.training.data import corpus_of as corpus_of
from avow.training.data import vocabulary_of as vocabulary_of
from avow.training.invented import invent as invent
from avow.training.invented import write_corpus as write_corpus
from avow.training.load import load_model as load_model
from avow.training.log import Progress as Progress
from avow.training.loop import Trained as Trained
from avow.training.loop import train as train
from avow.training.questions import QuestionExamples as QuestionExamples
from avow.training.questions import prompt as prompt
from avow.training.spans import SpanExamples as SpanExamples
from avow.training.spans import Spans as Spans
from avow.training.vocabulary import MASK as MASK
from avow.training.vocabulary import PAD as PAD
from avow.training.vocabulary import Vocabulary as Vocabulary
