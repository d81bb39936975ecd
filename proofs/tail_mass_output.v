(* What the output loses when keys are dropped and the weights of the others are renormalised. *)

From Coq Require Import Lia Lra.
From avow Require Import sums.

Theorem tail_mass_output (n d : nat) (s : vector) (v : nat -> vector) (kept : nat -> bool) :
  (exists j, (j < n)%nat /\ kept j = true) ->
  let alpha := softmax n s in
  let o := mean n alpha v in
  let tau := sum n (others kept alpha) in
  let m_H := mean n (chosen kept alpha) v in
  let m_T := mean n (others kept alpha) v in
  norm d (fun c => o c - m_H c) = tau * norm d (fun c => m_T c - m_H c) /\
  tau * norm d (fun c => m_T c - m_H c) <= 2 * tau * largest n (fun j => norm d (v j)).
Proof.
  intros [i [Hi Hkept]] alpha o tau m_H m_T.
  assert (Hn : (0 < n)%nat) by lia.
  assert (Halpha : forall j, 0 < alpha j) by (intros; apply softmax_pos, Hn).
  assert (Hsum : sum n alpha = 1) by apply softmax_sum, Hn.
  set (head := sum n (chosen kept alpha)).
  assert (Hparts : head + tau = 1) by (unfold head, tau; rewrite <- sum_parts; exact Hsum).
  assert (Hchosen : forall j, 0 <= chosen kept alpha j) by
    (intros j; unfold chosen; pose proof (Halpha j); destruct (kept j); lra).
  assert (Hothers : forall j, 0 <= others kept alpha j) by
    (intros j; unfold others; pose proof (Halpha j); destruct (kept j); lra).
  assert (Hhead : 0 < head).
  { apply Rlt_le_trans with (chosen kept alpha i); [unfold chosen; rewrite Hkept; apply Halpha|].
    apply sum_one; auto. }
  assert (Htau : 0 <= tau) by (apply sum_nonneg; auto).
  assert (Hmost : forall j, (j < n)%nat -> norm d (v j) <= largest n (fun j => norm d (v j))) by
    (intros; apply (largest_least n (fun j => norm d (v j))); assumption).
  (* In every coordinate, the sum of all parts is that of the kept and that of the dropped. *)
  assert (Hmoved : forall c, o c - m_H c = tau * (m_T c - m_H c)).
  { intros c. unfold o, m_H, m_T, mean. fold tau head. rewrite Hsum.
    set (h := sum n (fun j => chosen kept alpha j * v j c)). set (t := sum n (fun j => others kept alpha j * v j c)).
    replace (sum n (fun j => alpha j * v j c)) with (h + t).
    - destruct Htau as [Htau|Htau].
      + replace head with (1 - tau) in * by lra. field. lra.
      + assert (t = 0) as ->.
        { apply sum_zero. intros j Hj. replace (others kept alpha j) with 0; [ring|].
          apply Rle_antisym; [apply Hothers|]. rewrite Htau. apply sum_one; auto. }
        replace head with 1 by lra. rewrite <- Htau. unfold Rdiv. rewrite Rinv_1. ring.
    - unfold h, t. rewrite <- sum_plus. apply sum_ext. intros j _. unfold chosen, others. destruct (kept j); ring. }
  split.
  - rewrite (norm_ext d _ (fun c => tau * (m_T c - m_H c))) by auto.
    rewrite norm_scale, Rabs_right by (apply Rle_ge, Htau). reflexivity.
  - destruct Htau as [Htau|Htau]; [|rewrite <- Htau; lra].
    rewrite (Rmult_comm 2 tau), Rmult_assoc. apply Rmult_le_compat_l; [lra|].
    apply Rle_trans with (1 := norm_minus d m_T m_H).
    assert (norm d m_T <= largest n (fun j => norm d (v j))) by (apply mean_norm; auto).
    assert (norm d m_H <= largest n (fun j => norm d (v j))) by (apply mean_norm; auto).
    lra.
Qed.

(* What sparse attention promises: the distance to what is read, from intervals of the scores that are not. *)
Corollary sparse_bound (n d : nat) (s lower upper length : vector) (v : nat -> vector) (kept : nat -> bool) :
  (exists j, (j < n)%nat /\ kept j = true) ->
  (forall j, (j < n)%nat -> kept j = false -> lower j <= s j <= upper j /\ norm d (v j) <= length j) ->
  let o := mean n (softmax n s) v in
  let out := mean n (chosen kept (fun j => exp (s j))) v in
  norm d (fun c => o c - out c) <=
  sum n (others kept (fun j => exp (upper j) * (length j + norm d out))) /
    (sum n (chosen kept (fun j => exp (s j))) + sum n (others kept (fun j => exp (lower j)))).
Proof.
  intros [i [Hi Hkept]] Htail o out. assert (Hn : (0 < n)%nat) by lia.
  set (w := fun j => exp (s j)) in *.
  set (head := sum n (chosen kept w)). set (tail := sum n (others kept w)).
  assert (Hhead : 0 < head).
  { apply Rlt_le_trans with (chosen kept w i); [unfold chosen; rewrite Hkept; apply exp_pos|].
    apply sum_one; [exact Hi|]. intros j _. unfold chosen, w. pose proof (exp_pos (s j)). destruct (kept j); lra. }
  assert (Htail0 : forall t, 0 <= sum n (others kept (fun j => exp (t j)))).
  { intros t. apply sum_nonneg. intros j _. unfold others. pose proof (exp_pos (t j)). destruct (kept j); lra. }
  pose proof (Htail0 s : 0 <= tail) as Ht. pose proof (Htail0 lower) as Hl.
  assert (Hlow : sum n (others kept (fun j => exp (lower j))) <= tail).
  { apply sum_le. intros j Hj. unfold others, w. destruct (kept j) eqn:E; [lra|]. apply exp_le, (Htail j Hj E). }
  set (low := sum n (others kept (fun j => exp (lower j)))) in *.
  rewrite (norm_ext d _ (fun c => / (head + tail) * sum n (fun j => others kept w j * (v j c - out c)))).
  - rewrite norm_scale, Rabs_right by (apply Rle_ge, Rlt_le, Rinv_0_lt_compat; lra).
    unfold Rdiv. rewrite Rmult_comm. apply Rmult_le_compat; [apply norm_nonneg| |
      |apply Rinv_le_contravar; lra]; [apply Rlt_le, Rinv_0_lt_compat; lra|].
    apply Rle_trans with (1 := norm_sum d n (fun j c => others kept w j * (v j c - out c))).
    apply sum_le. intros j Hj. rewrite norm_scale. unfold others. destruct (kept j) eqn:E; [rewrite Rabs_R0; lra|].
    destruct (Htail j Hj E) as [[_ Hup] Hlen]. pose proof (exp_pos (s j)). pose proof (norm_nonneg d out).
    rewrite Rabs_right by (apply Rle_ge, Rlt_le, exp_pos).
    apply Rmult_le_compat; [apply Rlt_le, exp_pos | apply norm_nonneg | apply exp_le, Hup |].
    apply Rle_trans with (1 := norm_minus d (v j) out). lra.
  - intros c _. unfold o. rewrite mean_softmax by exact Hn. unfold mean. fold w.
    rewrite (sum_parts n kept w). fold head tail.
    rewrite (sum_ext n (fun j => exp (s j) * v j c) (fun j => chosen kept w j * v j c + others kept w j * v j c))
      by (intros j _; unfold chosen, others, w; destruct (kept j); ring).
    rewrite (sum_ext n (fun j => others kept w j * (v j c - out c))
      (fun j => others kept w j * v j c - others kept w j * out c)) by (intros; ring).
    rewrite sum_plus, sum_minus, sum_scale_r. fold tail. unfold out, mean. fold head. field. lra.
Qed.
