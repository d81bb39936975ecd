"""avow inside Hugging Face models.

Importing this registers the attention implementations `"avow"` and `"avow|method"` with transformers, together with
the masks they need; `enable` and `disable` switch a loaded model over and back.
"""

from avow.errors import MissingPackage

try:
    import transformers  # noqa: F401 - looked for, so that its absence is said in four parts
except ImportError as problem:
    rule = "is needed to put avow into its models"
    raise MissingPackage("transformers", "missing", rule, "pip install 'avow[hf]'") from problem

from avow.integrations.transformers.application import apply as apply
from avow.integrations.transformers.cache import CertifiedCache as CertifiedCache
from avow.integrations.transformers.model_plan import ModelPlan as ModelPlan
from avow.integrations.transformers.model_plan import read_plan as read_plan
from avow.integrations.transformers.names import register as register
from avow.integrations.transformers.profiling import Profile as Profile
from avow.integrations.transformers.profiling import profile as profile
from avow.integrations.transformers.setting import Setting as Setting
from avow.integrations.transformers.statement import Statement as Statement
from avow.integrations.transformers.statement import statement as statement
from avow.integrations.transformers.switch import disable as disable
from avow.integrations.transformers.switch import enable as enable
from avow.integrations.transformers.verification import Verdict as Verdict
from avow.integrations.transformers.verification import verify as verify

register()
