(* What the expectation of an exponential moving average from 0 falls short of. *)

From Coq Require Import Lia Lra Ratan FunctionalExtensionality.
From avow Require Import sums.

Theorem ema_bias (Omega : Type) (integrable : (Omega -> R) -> Prop) (E : (Omega -> R) -> R) (g : nat -> Omega -> R)
    (beta mu : R) :
  expectation integrable E -> 0 < beta < 1 -> (forall i, (1 <= i)%nat -> integrable (g i) /\ E (g i) = mu) ->
  forall t,
    E (moving_average beta g t) = (1 - beta ^ t) * mu /\
    ((1 <= t)%nat -> E (fun w => moving_average beta g t w / (1 - beta ^ t)) = mu).
Proof.
  intros HE Hbeta Hg.
  assert (Hmean : forall t,
    integrable (moving_average beta g t) /\ E (moving_average beta g t) = (1 - beta ^ t) * mu).
  { induction t as [|t [It Et]]; simpl.
    - destruct (expectation_constant _ _ HE 0) as [I0 ->]. split; [assumption|]. ring.
    - destruct (Hg (S t) ltac:(lia)) as [Ig Eg].
      destruct (expectation_linear _ _ HE beta (1 - beta) _ _ It Ig) as [I ->]. split; [exact I|].
      rewrite Et, Eg. ring. }
  intros t. destruct (Hmean t) as [It Et]. split; [exact Et|]. intros Ht.
  destruct (expectation_constant _ _ HE 0) as [I0 E0].
  assert (beta ^ t < 1) by (destruct Hbeta; apply pow_lt_1_compat; [lra | lia]).
  replace (fun w => moving_average beta g t w / (1 - beta ^ t))
    with (fun w => / (1 - beta ^ t) * moving_average beta g t w + 0 * (fun _ => 0) w)
    by (apply functional_extensionality; intros w; unfold Rdiv; ring).
  destruct (expectation_linear _ _ HE (/ (1 - beta ^ t)) 0 _ _ It I0) as [_ ->]. rewrite Et. field. lra.
Qed.
