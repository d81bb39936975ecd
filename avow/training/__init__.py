"""From a corpus to a trained model: documents and questions, batches, configuration, loop and checkpoints.

What is read:
    corpus              documents and questions from files
    invented            people who never were: a corpus without files
    vocabulary          characters and their numbers
    draws               random numbers by address, which need no stored generator
    spans               examples: a document loses a span, to be written back
    names               the same with spans kept off the name that a document begins with
    cloze               examples: a name, hardly any context, a span to remember
    language            examples: a document from its start
    questions           examples: a question and its answer
    weighted            kinds of examples in fixed shares
    tasks               from the name of a corpus to the examples of a task
    batches             steps by number, cut by length
    prefetch            steps made before they are asked for, for a GPU
A run:
    config              everything that decides it
    loop                train: from a configuration to a folder
    log                 what happened, as CSV
    checkpoint          all that it needs to go on, whole or not there
    checkpoint_shares   the same, each process its own part
    resuming            a run goes on only from what it was
    run_lock            one run at a time writes a folder
    load                a trained model from its files
    interrupt           Ctrl-C as a question that a loop asks
    graphs              passes recorded as CUDA graphs
    speed               how much of the device is used
Several processes:
    parallel            which of them this is, and a model that each holds whole
    sharding            a model that each holds a share of
    grid                sequences in parts, each held by another process
    rendezvous          how they find each other
    heartbeat           who is missing, when somebody is
What was learnt:
    sampling            what a model writes and answers
    evaluation          how much it knows, and whether it knows that
    knowledge           the experiment: what came of models that read, and of one that did not
    knowledge_arms      its runs, with all that decides them
    run_many            several of them at once
"""

from avow.training.batches import Batches as Batches
from avow.training.batches import Mixture as Mixture
from avow.training.cloze import ClozeExamples as ClozeExamples
from avow.training.config import TrainConfig as TrainConfig
from avow.training.config import read_config as read_config
from avow.training.corpus import Corpus as Corpus
from avow.training.corpus import Question as Question
from avow.training.corpus import read_corpus as read_corpus
from avow.training.corpus import read_documents as read_documents
from avow.training.corpus import read_questions as read_questions
from avow.training.evaluation import Bin as Bin
from avow.training.evaluation import Evaluation as Evaluation
from avow.training.evaluation import Outcome as Outcome
from avow.training.evaluation import always as always
from avow.training.evaluation import evaluate as evaluate
from avow.training.evaluation import majority as majority
from avow.training.invented import invent as invent
from avow.training.invented import write_corpus as write_corpus
from avow.training.language import LanguageExamples as LanguageExamples
from avow.training.load import load_model as load_model
from avow.training.log import Progress as Progress
from avow.training.loop import Trained as Trained
from avow.training.loop import train as train
from avow.training.names import SpansAfterName as SpansAfterName
from avow.training.questions import QuestionExamples as QuestionExamples
from avow.training.questions import prompt as prompt
from avow.training.sampling import Answer as Answer
from avow.training.sampling import answers as answers
from avow.training.sampling import sample as sample
from avow.training.spans import SpanExamples as SpanExamples
from avow.training.spans import Spans as Spans
from avow.training.tasks import corpus_of as corpus_of
from avow.training.tasks import vocabulary_of as vocabulary_of
from avow.training.vocabulary import MASK as MASK
from avow.training.vocabulary import PAD as PAD
from avow.training.vocabulary import Vocabulary as Vocabulary
from avow.training.weighted import Recipe as Recipe
from avow.training.weighted import weighted as weighted
