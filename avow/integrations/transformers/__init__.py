"""avow inside Hugging Face models.

Importing this registers the attention implementations `"avow"` and `"avow|method"` with transformers, together with
the masks they need; `enable` and `disable` switch a loaded model over and back.

Attention of a model:
    enabling       enable and disable: avow on in a model, and off so that nothing of it is left
    names          the names under which transformers finds avow
    setting        what is asked of a layer or a head
    layers         the attention layers of a model, and what each was asked
    forward        the function that transformers calls in every layer
    masks          which keys rows may see, from transformers' masks
    heads          a layer whose heads attend each in its own way
    cache          CertifiedCache: keys and values for `generate()`
    comparison     what is proved and measured of one run
A plan for each head:
    profiling      what each head does with a text, and the plan that follows
    hooks          seeing what each layer is asked while a model runs
    head_figures   what the weights of a head look like
    candidates     what each method can do for it
    model_plan     the plan, its file, and putting it into the model it was made for
    verification   whether it is safe: predictions beside exact attention's
    speed          whether it pays: what a new token costs, as it is, enabled and with the plan
    model_files    models and texts from files at hand
"""

from avow.errors import MissingPackage

try:
    import transformers  # noqa: F401 - looked for, so that its absence is said in four parts
except ImportError as error:
    rule = "is needed to put avow into its models"
    raise MissingPackage("transformers", "missing", rule, "pip install 'avow[hf]'") from error

from avow.integrations.transformers.cache import CertifiedCache as CertifiedCache
from avow.integrations.transformers.comparison import Statement as Statement
from avow.integrations.transformers.comparison import statement as statement
from avow.integrations.transformers.enabling import disable as disable
from avow.integrations.transformers.enabling import enable as enable
from avow.integrations.transformers.model_plan import ModelPlan as ModelPlan
from avow.integrations.transformers.model_plan import apply as apply
from avow.integrations.transformers.model_plan import read_plan as read_plan
from avow.integrations.transformers.names import register as register
from avow.integrations.transformers.profiling import Profile as Profile
from avow.integrations.transformers.profiling import profile as profile
from avow.integrations.transformers.setting import Setting as Setting
from avow.integrations.transformers.speed import Speed as Speed
from avow.integrations.transformers.speed import decoding_speed as decoding_speed
from avow.integrations.transformers.verification import Verdict as Verdict
from avow.integrations.transformers.verification import verify as verify

register()
