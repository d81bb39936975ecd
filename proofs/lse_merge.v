(* Attention over shards of the keys, merged. *)

From Coq Require Import Lia Lra Psatz FunctionalExtensionality.
From avow Require Import sums softmax_perturbation.

Theorem lse_merge :
  (* exact: merging what two shards answer gives what their keys together give *)
  (forall n m s v, (0 < n)%nat -> (0 < m)%nat ->
     merge (answer n s v) (answer m (fun j => s (n + j)%nat) (fun j => v (n + j)%nat)) = answer (n + m) s v) /\
  (forall x y, merge x y = merge y x) /\
  (forall x y z, merge (merge x y) z = merge x (merge y z)).
Proof.
  split; [|split].
  - intros n m s v Hn Hm. unfold merge, answer. simpl fst. simpl snd.
    pose proof (exp_sum_pos n s Hn) as HZ1. pose proof (exp_sum_pos m (fun j => s (n + j)%nat) Hm) as HZ2.
    rewrite (sum_join n m (fun j => exp (s j))).
    set (Z1 := sum n (fun j => exp (s j))) in *. set (Z2 := sum m (fun j => exp (s (n + j)%nat))) in *.
    rewrite !exp_ln by assumption. f_equal. apply functional_extensionality. intros c.
    unfold Rminus. rewrite !exp_plus, exp_Ropp, !exp_ln by lra. unfold mean.
    rewrite !softmax_sum by lia. rewrite sum_join.
    rewrite (sum_ext n (fun j => softmax (n + m) s j * v j c) (fun j => Z1 / (Z1 + Z2) * (softmax n s j * v j c))).
    2: { intros j _. unfold softmax. rewrite sum_join. fold Z1 Z2. field. lra. }
    rewrite (sum_ext m (fun j => softmax (n + m) s (n + j)%nat * v (n + j)%nat c)
      (fun j => Z2 / (Z1 + Z2) * (softmax m (fun j => s (n + j)%nat) j * v (n + j)%nat c))).
    2: { intros j _. unfold softmax. rewrite sum_join. fold Z1 Z2. field. lra. }
    rewrite !sum_scale. field. lra.
  - intros x y. unfold merge. rewrite (Rplus_comm (exp (fst y))). f_equal.
    apply functional_extensionality. intros c. ring.
  - intros x y z. unfold merge. simpl fst. simpl snd.
    pose proof (exp_pos (fst x)). pose proof (exp_pos (fst y)). pose proof (exp_pos (fst z)).
    rewrite !exp_ln, Rplus_assoc by lra. f_equal. apply functional_extensionality. intros c.
    unfold Rminus. rewrite !exp_plus, !exp_Ropp, !exp_ln by lra. field. lra.
Qed.

(* What a merge of certified shards promises. Shard i has the normaliser Z i and the answer o i; it reports ell i and
   out i. *)
Corollary merge_bound (m d : nat) (Z ell lambda E M : vector) (o out : nat -> vector) :
  (0 < m)%nat ->
  (forall i, (i < m)%nat -> 0 < Z i /\ Rabs (ell i - ln (Z i)) <= lambda i /\
     norm d (fun c => out i c - o i c) <= E i /\ norm d (o i) <= M i) ->
  let w := softmax m ell in
  let rho i := exp (lambda i) - 1 in
  norm d (fun c => mean m w out c - mean m Z o c) <=
  sum m (fun i => w i * E i) +
  Rmin (2 * tanh (largest m lambda / 2) * largest m M)
    (sum m (fun j => sum j (fun i => w i * w j * (rho i + rho j) * (M i + M j))) /
     sum m (fun i => w i * exp (- lambda i))).
Proof.
  intros Hm H w rho.
  assert (Hw : forall i, 0 < w i) by (intros; apply softmax_pos, Hm).
  assert (Hw1 : sum m w = 1) by apply softmax_sum, Hm.
  assert (HZ : 0 < sum m Z) by (apply sum_pos; [exact Hm|]; intros i Hi; apply H, Hi).
  assert (HM : forall i, (i < m)%nat -> norm d (o i) <= largest m M).
  { intros i Hi. apply Rle_trans with (M i); [apply H, Hi | apply largest_least, Hi]. }
  assert (HE : norm d (fun c => mean m w out c - mean m w o c) <= sum m (fun i => w i * E i)).
  { rewrite (norm_ext d _ (fun c => sum m (fun i => w i * (out i c - o i c)))).
    - apply Rle_trans with (1 := norm_sum d m (fun i c => w i * (out i c - o i c))). apply sum_le. intros i Hi.
      rewrite norm_scale, Rabs_right by (apply Rle_ge, Rlt_le, Hw).
      apply Rmult_le_compat_l; [apply Rlt_le, Hw | apply H, Hi].
    - intros c _. unfold mean. rewrite Hw1.
      rewrite (sum_ext m (fun i => w i * (out i c - o i c)) (fun i => w i * out i c - w i * o i c)) by (intros; ring).
      rewrite sum_minus. field. }
  enough (Hshift : norm d (fun c => mean m w o c - mean m Z o c) <=
    Rmin (2 * tanh (largest m lambda / 2) * largest m M)
      (sum m (fun j => sum j (fun i => w i * w j * (rho i + rho j) * (M i + M j))) /
       sum m (fun i => w i * exp (- lambda i)))).
  { rewrite (norm_ext d _ (fun c => (mean m w out c - mean m w o c) + (mean m w o c - mean m Z o c))) by (intros; ring).
    apply Rle_trans with (1 := norm_plus d (fun c => mean m w out c - mean m w o c) _). lra. }
  apply Rmin_glb.
  - (* The true weights are those of the logarithms of the true normalisers. *)
    set (w' := softmax m (fun i => ln (Z i))).
    assert (Htrue : forall i, (i < m)%nat -> w' i = Z i / sum m Z).
    { intros i Hi. unfold w', softmax. rewrite exp_ln by (apply H, Hi). f_equal.
      apply sum_ext. intros j Hj. apply exp_ln, H, Hj. }
    rewrite (norm_ext d _ (fun c => sum m (fun i => (w i - w' i) * o i c))).
    + apply Rle_trans with (1 := norm_sum d m (fun i c => (w i - w' i) * o i c)).
      apply Rle_trans with (sum m (fun i => Rabs (w i - w' i)) * largest m M).
      * rewrite <- sum_scale_r. apply sum_le. intros i Hi. rewrite norm_scale.
        apply Rmult_le_compat_l; [apply Rabs_pos | apply HM, Hi].
      * apply Rmult_le_compat_r; [apply largest_nonneg|].
        apply Rle_trans with (1 := proj1 softmax_perturbation m ell (fun i => ln (Z i))). rewrite !tanh_half.
        assert (Hle : exp (largest m (fun i => Rabs (ell i - ln (Z i)))) <= exp (largest m lambda)).
        { apply exp_le, largest_bound; [apply largest_nonneg|]. intros i Hi.
          apply Rle_trans with (lambda i); [apply H, Hi | apply largest_least, Hi]. }
        pose proof (exp_pos (largest m (fun i => Rabs (ell i - ln (Z i))))).
        set (a := exp (largest m (fun i => Rabs (ell i - ln (Z i))))) in *. set (b := exp (largest m lambda)) in *.
        replace (2 * (a - 1) / (a + 1)) with (2 - 4 * / (a + 1)) by (field; lra).
        replace (2 * (b - 1) / (b + 1)) with (2 - 4 * / (b + 1)) by (field; lra).
        assert (/ (b + 1) <= / (a + 1)) by (apply Rinv_le_contravar; lra). lra.
    + intros c _. unfold mean. rewrite Hw1.
      rewrite (sum_ext m (fun i => (w i - w' i) * o i c) (fun i => w i * o i c - / sum m Z * (Z i * o i c)))
        by (intros i Hi; rewrite Htrue by exact Hi; field; lra).
      rewrite sum_minus, sum_scale. field. lra.
  - (* Pair by pair. *)
    set (g := fun i => Z i / exp (ell i)).
    assert (Hg : forall i, (i < m)%nat -> exp (- lambda i) <= g i /\ Rabs (g i - 1) <= rho i).
    { intros i Hi. destruct (H i Hi) as (HZi & Hl & _).
      assert (Hd : - lambda i <= ln (Z i) - ell i <= lambda i) by
        (unfold Rabs in Hl; destruct (Rcase_abs (ell i - ln (Z i))); lra).
      assert (g i = exp (ln (Z i) - ell i)) as ->.
      { unfold g, Rminus. rewrite exp_plus, exp_Ropp, exp_ln by exact HZi. reflexivity. }
      split; [apply exp_le; lra|]. unfold rho.
      assert (exp (ln (Z i) - ell i) <= exp (lambda i)) by (apply exp_le; lra).
      assert (exp (- lambda i) <= exp (ln (Z i) - ell i)) by (apply exp_le; lra).
      assert (1 - exp (- lambda i) <= exp (lambda i) - 1).
      { rewrite exp_Ropp. pose proof (exp_pos (lambda i)). apply Rmult_le_reg_r with (exp (lambda i)); [lra|].
        replace ((1 - / exp (lambda i)) * exp (lambda i)) with (exp (lambda i) - 1) by (field; lra).
        pose proof (Rle_0_sqr (exp (lambda i) - 1)). unfold Rsqr in *. lra. }
      apply Rabs_le. lra. }
    set (low := sum m (fun i => w i * exp (- lambda i))). set (S := sum m (fun i => w i * g i)).
    assert (Hlow : 0 < low).
    { apply sum_pos; [exact Hm|]. intros i _. apply Rmult_lt_0_compat; [apply Hw | apply exp_pos]. }
    assert (HS : low <= S).
    { apply sum_le. intros i Hi. apply Rmult_le_compat_l; [apply Rlt_le, Hw | apply Hg, Hi]. }
    pose proof (exp_sum_pos m ell Hm) as Hell.
    assert (HSZ : S = sum m Z / sum m (fun i => exp (ell i))).
    { unfold S, Rdiv. rewrite <- sum_scale_r. apply sum_ext. intros i _. unfold w, softmax, g.
      pose proof (exp_pos (ell i)). field. lra. }
    rewrite (norm_ext d _ (fun c => / S * sum m (fun j => sum j (fun i =>
      w i * w j * (g j - g i) * (o i c - o j c))))).
    + rewrite norm_scale, Rabs_right by (apply Rle_ge, Rlt_le, Rinv_0_lt_compat; lra).
      unfold Rdiv. rewrite Rmult_comm. apply Rmult_le_compat;
        [apply norm_nonneg | apply Rlt_le, Rinv_0_lt_compat; lra | | apply Rinv_le_contravar; lra].
      apply Rle_trans with (1 := norm_sum d m (fun j c => sum j (fun i => w i * w j * (g j - g i) * (o i c - o j c)))).
      apply sum_le. intros j Hj.
      apply Rle_trans with (1 := norm_sum d j (fun i c => w i * w j * (g j - g i) * (o i c - o j c))).
      apply sum_le. intros i Hij. assert (Hi : (i < m)%nat) by lia. rewrite norm_scale.
      apply Rmult_le_compat; [apply Rabs_pos | apply norm_nonneg | |].
      * rewrite !Rabs_mult, (Rabs_right (w i)), (Rabs_right (w j)) by (apply Rle_ge, Rlt_le, Hw).
        apply Rmult_le_compat_l; [apply Rmult_le_pos; apply Rlt_le, Hw|].
        replace (g j - g i) with (g j - 1 - (g i - 1)) by ring.
        apply Rle_trans with (1 := Rabs_triang (g j - 1) (- (g i - 1))). rewrite Rabs_Ropp.
        pose proof (proj2 (Hg i Hi)). pose proof (proj2 (Hg j Hj)). lra.
      * apply Rle_trans with (1 := norm_minus d (o i) (o j)).
        assert (norm d (o i) <= M i) by apply H, Hi. assert (norm d (o j) <= M j) by apply H, Hj. lra.
    + intros c _.
      rewrite (sum_ext m (fun j => sum j (fun i => w i * w j * (g j - g i) * (o i c - o j c)))
        (fun j => sum j (fun i => - (w i * w j * g i * (o i c - o j c)) + - (w j * w i * g j * (o j c - o i c)))))
        by (intros j _; apply sum_ext; intros; ring).
      rewrite <- (sum_pairs m (fun i j => - (w i * w j * g i * (o i c - o j c)))) by (intros; ring).
      rewrite (sum_ext m (fun i => sum m (fun j => - (w i * w j * g i * (o i c - o j c))))
        (fun i => w i * g i * sum m (fun j => w j * o j c) - w i * g i * o i c)).
      * rewrite sum_minus, sum_scale_r. fold S. unfold mean. rewrite Hw1.
        assert (sum m (fun i => w i * g i * o i c) = S / sum m Z * sum m (fun i => Z i * o i c)) as ->.
        { rewrite HSZ, <- sum_scale. apply sum_ext. intros i _. unfold w, softmax, g. pose proof (exp_pos (ell i)).
          field. lra. }
        field. lra.
      * intros i _. replace (w i * g i * o i c) with (w i * g i * o i c * sum m w) by (rewrite Hw1; ring).
        rewrite <- !sum_scale, <- sum_minus. apply sum_ext. intros. ring.
Qed.
