"""avow inside Hugging Face models.

Importing this registers the attention implementations `"avow"` and `"avow|method"` with transformers, together with
the masks they need; `enable` and `disable` switch a loaded model over and back.

    enabling      Setting, enable and disable: how each layer attends; avow on in a model, and off without a trace
    forward       the function that transformers calls in every layer
    call_view     one call as `avow.attend` takes it: transformers' masks in their simplest form
    routing       which method answers a call, and why it is not the one that was asked for
    cache         CertifiedCache: keys and values for `generate()`
    audited       attention functions and caches as `avow.auditing` sees them
    graphs        calls for the next tokens as CUDA graphs
    observers     who looks at answers, or gives them
    verified      tokens of exact attention: several are drafted, and verified in one pass
    head_kinds    what a head does, by rules: rests, looks one word back, finds the same word, ...
    profiling     what each head does with a text, what each method can do for it, and the plan that follows
    reading       what every head reads of a text for one word, and what it provably need not
    model_plan    the plan, its file, putting it into a model; whether it is safe and whether it pays
    model_files   models and texts from local files
"""

from avow.extras import require

require("transformers", "huggingface_hub", "safetensors", purpose="to put avow into its models", extra="hf")

from avow.integrations.transformers.cache import CertifiedCache as CertifiedCache
from avow.integrations.transformers.enabling import Setting as Setting
from avow.integrations.transformers.enabling import disable as disable
from avow.integrations.transformers.enabling import enable as enable
from avow.integrations.transformers.forward import register as register
from avow.integrations.transformers.graphs import Steps as Steps
from avow.integrations.transformers.model_plan import ModelPlan as ModelPlan
from avow.integrations.transformers.model_plan import Speed as Speed
from avow.integrations.transformers.model_plan import Statement as Statement
from avow.integrations.transformers.model_plan import Verdict as Verdict
from avow.integrations.transformers.model_plan import apply as apply
from avow.integrations.transformers.model_plan import decoding_speed as decoding_speed
from avow.integrations.transformers.model_plan import read_plan as read_plan
from avow.integrations.transformers.model_plan import statement as statement
from avow.integrations.transformers.model_plan import verify as verify
from avow.integrations.transformers.profiling import Profile as Profile
from avow.integrations.transformers.profiling import profile as profile
from avow.integrations.transformers.verified import Verification as Verification

register()
