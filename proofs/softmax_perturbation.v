(* How far softmax weights move when scores do. *)

From Coq Require Import Lia Lra Psatz.
From avow Require Import sums.

(* 2·tanh(x/2), by t = e^x. *)
Lemma tanh_half x : 2 * tanh (x / 2) = 2 * (exp x - 1) / (exp x + 1).
Proof.
  unfold tanh, sinh, cosh. pose proof (exp_pos (x / 2)) as Hp.
  replace (exp x) with (exp (x / 2) * exp (x / 2)) by (rewrite <- exp_plus; f_equal; field).
  rewrite exp_Ropp. set (h := exp (x / 2)) in *. field. split; nra.
Qed.

(* What a set of weight p gains when its terms grow at most t-fold and all others shrink at most t-fold. *)
Lemma gain p t : 0 <= p <= 1 -> 1 <= t -> p * t / (p * t + (1 - p) / t) - p <= (t - 1) / (t + 1).
Proof.
  intros [Hp Hp1] Ht.
  assert (Hq : 0 <= p * (t * t - 1)) by (apply Rmult_le_pos; nra).
  set (short := (t - 1) * ((p * (t + 1) - 1) * (p * (t + 1) - 1)) / ((t + 1) * (1 + p * (t * t - 1)))).
  assert (0 <= short).
  { apply Rmult_le_pos; [|apply Rlt_le, Rinv_0_lt_compat; nra]. apply Rmult_le_pos; [lra | apply Rle_0_sqr]. }
  enough (p * t / (p * t + (1 - p) / t) - p = (t - 1) / (t + 1) - short) by lra.
  assert (p * t + (1 - p) / t = (1 + p * (t * t - 1)) / t) as -> by (field; lra).
  unfold short. field. repeat split; nra.
Qed.

Theorem softmax_perturbation :
  (forall n a b,
     sum n (fun i => Rabs (softmax n a i - softmax n b i)) <= 2 * tanh (largest n (fun i => Rabs (a i - b i)) / 2)) /\
  (forall delta, 0 <= delta -> exists n a b,
     largest n (fun i => Rabs (a i - b i)) = delta /\
     sum n (fun i => Rabs (softmax n a i - softmax n b i)) = 2 * tanh (delta / 2)).
Proof.
  split.
  - intros n a b. set (delta := largest n (fun i => Rabs (a i - b i))).
    assert (Hdelta : 0 <= delta) by apply largest_nonneg.
    assert (Hnear : forall i, (i < n)%nat -> - delta <= a i - b i <= delta).
    { intros i Hi. pose proof (largest_least n (fun i => Rabs (a i - b i)) i Hi) as H. fold delta in H.
      simpl in H. unfold Rabs in H. destruct (Rcase_abs (a i - b i)); lra. }
    rewrite tanh_half. set (t := exp delta). assert (Ht : 1 <= t) by (rewrite <- exp_0; apply exp_le; lra).
    destruct (Nat.eq_dec n 0) as [->|Hn].
    { simpl. apply Rmult_le_pos; [lra|]. apply Rlt_le, Rinv_0_lt_compat. lra. }
    assert (Hn0 : (0 < n)%nat) by lia. clear Hn.
    set (gains := fun i => if Rle_dec (softmax n b i) (softmax n a i) then true else false).
    set (U := sum n (chosen gains (fun i => exp (a i)))). set (L := sum n (others gains (fun i => exp (a i)))).
    set (U' := sum n (chosen gains (fun i => exp (b i)))). set (L' := sum n (others gains (fun i => exp (b i)))).
    assert (Hall : forall g s, sum n (chosen g (softmax n s)) =
      sum n (chosen g (fun i => exp (s i))) /
        (sum n (chosen g (fun i => exp (s i))) + sum n (others g (fun i => exp (s i))))).
    { intros g s. rewrite <- sum_parts. unfold Rdiv. rewrite <- sum_scale_r. apply sum_ext. intros i _.
      unfold chosen, softmax. destruct (g i); [reflexivity | ring]. }
    assert (Hboth : forall s, sum n (others gains (softmax n s)) = 1 - sum n (chosen gains (softmax n s))).
    { intros s. pose proof (softmax_sum n s Hn0) as H. rewrite (sum_parts n gains) in H. lra. }
    assert (Hsplit : sum n (fun i => Rabs (softmax n a i - softmax n b i)) =
      2 * (sum n (chosen gains (softmax n a)) - sum n (chosen gains (softmax n b)))).
    { transitivity ((sum n (chosen gains (softmax n a)) - sum n (chosen gains (softmax n b))) +
        (sum n (others gains (softmax n b)) - sum n (others gains (softmax n a)))); [|rewrite !Hboth; ring].
      rewrite <- !sum_minus, <- sum_plus. apply sum_ext. intros i _. unfold chosen, others, gains.
      destruct (Rle_dec (softmax n b i) (softmax n a i)).
      - rewrite Rabs_right; lra.
      - rewrite Rabs_left; lra. }
    rewrite Hsplit, !Hall. fold U L U' L'.
    assert (Hfold : forall s g,
      0 <= sum n (chosen g (fun i => exp (s i))) /\ 0 <= sum n (others g (fun i => exp (s i)))).
    { intros s g. split; apply sum_nonneg; intros i _; unfold chosen, others; pose proof (exp_pos (s i));
        destruct (g i); lra. }
    assert (0 <= U /\ 0 <= L) as [HU HL] by apply Hfold. assert (0 <= U' /\ 0 <= L') as [HU' HL'] by apply Hfold.
    assert (Hs' : 0 < U' + L') by (unfold U', L'; rewrite <- sum_parts; apply exp_sum_pos, Hn0).
    assert (Hs : 0 < U + L) by (unfold U, L; rewrite <- sum_parts; apply exp_sum_pos, Hn0).
    assert (HUt : U <= U' * t).
    { unfold U, U'. rewrite <- sum_scale_r. apply sum_le. intros i Hi. unfold chosen. destruct (gains i); [|lra].
      unfold t. rewrite <- exp_plus. apply exp_le. specialize (Hnear i Hi). lra. }
    assert (HLt : L' / t <= L).
    { unfold L, L', Rdiv. rewrite <- sum_scale_r. apply sum_le. intros i Hi. unfold others. destruct (gains i); [lra|].
      unfold t. rewrite <- exp_Ropp, <- exp_plus. apply exp_le. specialize (Hnear i Hi). lra. }
    assert (HLt' : L' <= L * t).
    { apply Rmult_le_compat_r with (r := t) in HLt; [|lra].
      replace (L' / t * t) with L' in HLt by (field; lra). exact HLt. }
    set (p := U' / (U' + L')).
    assert (Hp : 0 <= p <= 1).
    { unfold p. split; [apply Rmult_le_pos; [exact HU'|apply Rlt_le, Rinv_0_lt_compat, Hs']|].
      apply Rmult_le_reg_r with (1 := Hs'). field_simplify; lra. }
    assert (Hmost : U / (U + L) <= p * t / (p * t + (1 - p) / t)).
    { assert (Hd : 0 < U' * t * t + L') by nra.
      replace (p * t / (p * t + (1 - p) / t)) with (U' * t * t / (U' * t * t + L')).
      - apply Rmult_le_reg_r with (1 := Hs). apply Rmult_le_reg_r with (1 := Hd).
        replace (U / (U + L) * (U + L) * (U' * t * t + L')) with (U * (U' * t * t + L')) by (field; lra).
        replace (U' * t * t / (U' * t * t + L') * (U + L) * (U' * t * t + L'))
          with (U' * t * t * (U + L)) by (field; lra).
        assert (U * L' <= U' * t * (L * t)) by (apply Rmult_le_compat; assumption). nra.
      - unfold p. field. repeat split; (lra || nra). }
    pose proof (gain p t Hp Ht).
    replace (2 * (t - 1) / (t + 1)) with (2 * ((t - 1) / (t + 1))) by (field; lra). lra.
  - intros delta Hdelta.
    exists 2%nat, (fun i => if Nat.eqb i 0 then delta else 0), (fun i => if Nat.eqb i 0 then 0 else delta).
    assert (Ht : 1 <= exp delta) by (rewrite <- exp_0; apply exp_le; lra).
    split.
    + simpl. rewrite Rminus_0_r, Rminus_0_l, Rabs_Ropp, (Rabs_right delta) by lra.
      rewrite (Rmax_right 0 delta) by lra. apply Rmax_left. lra.
    + rewrite tanh_half. unfold softmax. simpl. rewrite exp_0. set (t := exp delta) in *.
      replace (t / (0 + t + 1) - 1 / (0 + 1 + t)) with ((t - 1) / (t + 1)) by (field; lra).
      replace (1 / (0 + t + 1) - t / (0 + 1 + t)) with (- ((t - 1) / (t + 1))) by (field; lra).
      rewrite Rabs_Ropp, Rabs_right; [field; lra|].
      apply Rle_ge, Rmult_le_pos; [lra|]. apply Rlt_le, Rinv_0_lt_compat. lra.
Qed.
