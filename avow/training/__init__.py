"""From a corpus to a trained model: data, tasks, configuration, loop and checkpoints.

What is read:
    data            documents and questions, of a corpus folder or invented
    sources         documents of text files, token ids, tables and datasets
    tokenizer       a text as numbers: by characters, bytes, or a file of the library tokenizers
    examples        the examples of a task: language, spans, questions, or a mixture; some of them held out
    facts           statements of what training questions ask for, found in all texts
    names           who a text is about, and by which words
    batches         steps by number, cut by length, made ahead for a GPU
A run:
    config          everything that decides it
    field_names     what its fields are called elsewhere
    loop            train: from a configuration to a folder
    run_folder      its lock, its log, and how it is asked to stop
    checkpoint      all that it needs to continue, and when it may
    distributed     several processes: how they meet, watch each other and divide the work
    sharding        a model that each process holds a share of, and its checkpoints
What was learnt:
    evaluation      what a model writes and answers, how well it predicts a text, how much it knows
    knowledge       the experiment: models that read, and one that did not
    run_many        several of its runs at once, each in a process of its own
"""

from avow.training.batches import Batches as Batches
from avow.training.checkpoint import load_model as load_model
from avow.training.config import TrainConfig as TrainConfig
from avow.training.config import read_config as read_config
from avow.training.data import Corpus as Corpus
from avow.training.data import Document as Document
from avow.training.data import Question as Question
from avow.training.data import TokenDocument as TokenDocument
from avow.training.data import corpus_of as corpus_of
from avow.training.data import invent as invent
from avow.training.data import read_corpus as read_corpus
from avow.training.data import read_documents as read_documents
from avow.training.data import read_questions as read_questions
from avow.training.data import tokenizer_of as tokenizer_of
from avow.training.data import write_corpus as write_corpus
from avow.training.evaluation import Answer as Answer
from avow.training.evaluation import Bin as Bin
from avow.training.evaluation import Evaluation as Evaluation
from avow.training.evaluation import Outcome as Outcome
from avow.training.evaluation import TextLoss as TextLoss
from avow.training.evaluation import always as always
from avow.training.evaluation import answers as answers
from avow.training.evaluation import evaluate as evaluate
from avow.training.evaluation import majority as majority
from avow.training.evaluation import sample as sample
from avow.training.evaluation import text_loss as text_loss
from avow.training.examples import ClozeExamples as ClozeExamples
from avow.training.examples import LanguageExamples as LanguageExamples
from avow.training.examples import Mixture as Mixture
from avow.training.examples import QuestionExamples as QuestionExamples
from avow.training.examples import Recipe as Recipe
from avow.training.examples import SpanExamples as SpanExamples
from avow.training.examples import Spans as Spans
from avow.training.examples import prompt as prompt
from avow.training.loop import Reading as Reading
from avow.training.loop import Trained as Trained
from avow.training.loop import train as train
from avow.training.run_folder import Progress as Progress
from avow.training.sources import read_data as read_data
from avow.training.tokenizer import MASK as MASK
from avow.training.tokenizer import PAD as PAD
from avow.training.tokenizer import ByteTokenizer as ByteTokenizer
from avow.training.tokenizer import CharacterTokenizer as CharacterTokenizer
from avow.training.tokenizer import FileTokenizer as FileTokenizer
from avow.training.tokenizer import IdTokenizer as IdTokenizer
from avow.training.tokenizer import Tokenizer as Tokenizer
