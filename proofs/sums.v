(* Finite sums, vectors and softmax: what the proofs share. *)

From Coq Require Import Lia Lra Psatz.
From avow Require Export definitions.

Lemma sum_ext n f g : (forall i, (i < n)%nat -> f i = g i) -> sum n f = sum n g.
Proof. induction n; intros H; simpl; [reflexivity|]. rewrite IHn, (H n); auto. Qed.

Lemma sum_le n f g : (forall i, (i < n)%nat -> f i <= g i) -> sum n f <= sum n g.
Proof. induction n; intros H; simpl; [lra|]. apply Rplus_le_compat; auto. Qed.

Lemma sum_plus n f g : sum n (fun i => f i + g i) = sum n f + sum n g.
Proof. induction n; simpl; lra. Qed.

Lemma sum_minus n f g : sum n (fun i => f i - g i) = sum n f - sum n g.
Proof. induction n; simpl; lra. Qed.

Lemma sum_scale n a f : sum n (fun i => a * f i) = a * sum n f.
Proof. induction n; simpl; lra. Qed.

Lemma sum_scale_r n a f : sum n (fun i => f i * a) = sum n f * a.
Proof. induction n; simpl; lra. Qed.

Lemma sum_const n a : sum n (fun _ => a) = INR n * a.
Proof. induction n; [simpl; lra|]. rewrite S_INR. simpl. lra. Qed.

Lemma sum_zero n f : (forall i, (i < n)%nat -> f i = 0) -> sum n f = 0.
Proof. intros H. rewrite (sum_ext n f (fun _ => 0) H), sum_const. lra. Qed.

Lemma sum_nonneg n f : (forall i, (i < n)%nat -> 0 <= f i) -> 0 <= sum n f.
Proof. intros H. rewrite <- (sum_zero n (fun _ => 0)) by auto. apply sum_le; auto. Qed.

Lemma sum_pos n f : (0 < n)%nat -> (forall i, (i < n)%nat -> 0 < f i) -> 0 < sum n f.
Proof.
  intros Hn H. destruct n; [lia|]. simpl.
  assert (0 <= sum n f) by (apply sum_nonneg; intros; apply Rlt_le; auto).
  assert (0 < f n) by auto. lra.
Qed.

Lemma sum_abs n f : Rabs (sum n f) <= sum n (fun i => Rabs (f i)).
Proof.
  induction n; simpl; [rewrite Rabs_R0; lra|].
  apply Rle_trans with (Rabs (sum n f) + Rabs (f n)); [apply Rabs_triang | lra].
Qed.

Lemma sum_swap n m (f : nat -> nat -> R) : sum n (fun i => sum m (f i)) = sum m (fun j => sum n (fun i => f i j)).
Proof.
  induction n; simpl.
  - symmetry. apply sum_zero. auto.
  - rewrite IHn, <- sum_plus. apply sum_ext. auto.
Qed.

Lemma sum_join n m f : sum (n + m) f = sum n f + sum m (fun i => f (n + i)%nat).
Proof.
  induction m; simpl; [rewrite Nat.add_0_r; lra|].
  rewrite Nat.add_succ_r. simpl. lra.
Qed.

Lemma sum_first n f : sum (S n) f = f O + sum n (fun i => f (S i)).
Proof. rewrite <- Nat.add_1_l, sum_join. simpl. lra. Qed.

(* A sum over all pairs is one over unordered pairs. *)
Lemma sum_pairs m (f : nat -> nat -> R) : (forall i, f i i = 0) ->
  sum m (fun i => sum m (f i)) = sum m (fun j => sum j (fun i => f i j + f j i)).
Proof.
  intros Hd. induction m as [|m IH]; [reflexivity|]. simpl.
  rewrite sum_plus, IH, Hd, sum_plus. ring.
Qed.

Lemma sum_parts n p f : sum n f = sum n (chosen p f) + sum n (others p f).
Proof. rewrite <- sum_plus. apply sum_ext. intros i _. unfold chosen, others. destruct (p i); lra. Qed.

Lemma sum_chosen_one n a f : (a < n)%nat -> sum n (chosen (Nat.eqb a) f) = f a.
Proof.
  unfold chosen. induction n; intros H; [lia|]. simpl. destruct (Nat.eqb_spec a n) as [<-|E].
  - rewrite (sum_zero a); [lra|]. intros i Hi. destruct (Nat.eqb_spec a i); [lia|reflexivity].
  - rewrite IHn by lia. lra.
Qed.

Lemma sum_but n a f : (a < n)%nat -> sum n f = f a + sum n (but a f).
Proof. intros H. rewrite (sum_parts n (Nat.eqb a)), sum_chosen_one by assumption. reflexivity. Qed.

Lemma but_own a f : but a f a = 0.
Proof. unfold but, others. rewrite Nat.eqb_refl. reflexivity. Qed.

Lemma but_other a f i : i <> a -> but a f i = f i.
Proof. intros H. unfold but, others. destruct (Nat.eqb_spec a i); [congruence|reflexivity]. Qed.

Lemma sum_one n a f : (a < n)%nat -> (forall i, (i < n)%nat -> 0 <= f i) -> f a <= sum n f.
Proof.
  intros Ha H. rewrite (sum_but n a f Ha). enough (0 <= sum n (but a f)) by lra.
  apply sum_nonneg. intros i Hi. unfold but, others. destruct (Nat.eqb a i); [lra|auto].
Qed.

Lemma largest_least n f i : (i < n)%nat -> f i <= largest n f.
Proof.
  induction n; intros H; [lia|]. simpl. destruct (Nat.eq_dec i n) as [->|E].
  - apply Rmax_r.
  - apply Rle_trans with (largest n f); [apply IHn; lia | apply Rmax_l].
Qed.

Lemma largest_nonneg n f : 0 <= largest n f.
Proof. induction n; simpl; [lra|]. apply Rle_trans with (largest n f); [assumption | apply Rmax_l]. Qed.

Lemma largest_bound n f m : 0 <= m -> (forall i, (i < n)%nat -> f i <= m) -> largest n f <= m.
Proof. induction n; intros Hm H; simpl; [exact Hm|]. apply Rmax_lub; auto. Qed.

(* Vectors. *)

Lemma dot_comm d a b : dot d a b = dot d b a.
Proof. apply sum_ext. intros. ring. Qed.

Lemma dot_plus d a b x : dot d (fun c => a c + b c) x = dot d a x + dot d b x.
Proof. unfold dot. rewrite <- sum_plus. apply sum_ext. intros. ring. Qed.

Lemma dot_minus d a b x : dot d (fun c => a c - b c) x = dot d a x - dot d b x.
Proof. unfold dot. rewrite <- sum_minus. apply sum_ext. intros. ring. Qed.

Lemma dot_scale d t a x : dot d (fun c => t * a c) x = t * dot d a x.
Proof. unfold dot. rewrite <- sum_scale. apply sum_ext. intros. ring. Qed.

Lemma dot_nonneg d a : 0 <= dot d a a.
Proof. apply sum_nonneg. intros. nra. Qed.

Lemma norm_nonneg d a : 0 <= norm d a.
Proof. apply sqrt_pos. Qed.

Lemma norm_square d a : norm d a * norm d a = dot d a a.
Proof. apply sqrt_sqrt, dot_nonneg. Qed.

Lemma norm_ext d a b : (forall c, (c < d)%nat -> a c = b c) -> norm d a = norm d b.
Proof. intros H. unfold norm, dot. f_equal. apply sum_ext. intros. rewrite H; auto. Qed.

(* A quadratic that is never negative has no positive discriminant. *)
Lemma discriminant p q r : 0 <= r -> (forall t, 0 <= p + 2 * t * q + t * t * r) -> q * q <= p * r.
Proof.
  intros Hr H. destruct (Rle_lt_or_eq_dec 0 r Hr) as [Hr'|<-].
  - specialize (H (- q / r)).
    replace (p + 2 * (- q / r) * q + - q / r * (- q / r) * r) with ((p * r - q * q) / r) in H by (field; lra).
    apply Rmult_le_compat_r with (r := r) in H; [|lra].
    replace ((p * r - q * q) / r * r) with (p * r - q * q) in H by (field; lra). lra.
  - destruct (Req_dec q 0) as [->|Hq]; [lra|]. specialize (H (- (p + 1) / (2 * q))).
    replace (p + 2 * (- (p + 1) / (2 * q)) * q + - (p + 1) / (2 * q) * (- (p + 1) / (2 * q)) * 0) with (-1) in H
      by (field; lra). lra.
Qed.

Lemma cauchy_schwarz d a b : Rabs (dot d a b) <= norm d a * norm d b.
Proof.
  unfold norm. rewrite <- sqrt_mult by apply dot_nonneg. rewrite <- sqrt_Rsqr_abs.
  apply sqrt_le_1_alt. unfold Rsqr. apply discriminant; [apply dot_nonneg|]. intros t.
  replace (dot d a a + 2 * t * dot d a b + t * t * dot d b b)
    with (dot d (fun c => a c + t * b c) (fun c => a c + t * b c)); [apply dot_nonneg|].
  unfold dot. rewrite <- !sum_scale, <- !sum_plus. apply sum_ext. intros. ring.
Qed.

Lemma norm_scale d t a : norm d (fun c => t * a c) = Rabs t * norm d a.
Proof.
  unfold norm. rewrite dot_scale, dot_comm, dot_scale, <- Rmult_assoc, sqrt_mult_alt by nra.
  f_equal. apply sqrt_Rsqr_abs.
Qed.

Lemma norm_plus d a b : norm d (fun c => a c + b c) <= norm d a + norm d b.
Proof.
  apply Rsqr_incr_0; [|apply norm_nonneg| pose proof (norm_nonneg d a); pose proof (norm_nonneg d b); lra].
  unfold Rsqr. rewrite norm_square, dot_plus, !(dot_comm d _ (fun c => a c + b c)), !dot_plus, (dot_comm d b a).
  pose proof (cauchy_schwarz d a b). pose proof (Rle_abs (dot d a b)).
  pose proof (norm_square d a). pose proof (norm_square d b). nra.
Qed.

Lemma norm_minus d a b : norm d (fun c => a c - b c) <= norm d a + norm d b.
Proof.
  rewrite (norm_ext d _ (fun c => a c + (-1) * b c)) by (intros; ring).
  apply Rle_trans with (1 := norm_plus d _ _). rewrite norm_scale, Rabs_left by lra. lra.
Qed.

Lemma norm_sum d n (x : nat -> vector) :
  norm d (fun c => sum n (fun j => x j c)) <= sum n (fun j => norm d (x j)).
Proof.
  induction n; simpl.
  - unfold norm, dot. rewrite sum_zero by (intros; ring). rewrite sqrt_0. lra.
  - apply Rle_trans with (1 := norm_plus d _ _). lra.
Qed.

(* A mean with weights that are not negative is no longer than the longest vector that has weight. *)
Lemma mean_norm d n w v m :
  (forall j, (j < n)%nat -> 0 <= w j) -> 0 < sum n w -> (forall j, (j < n)%nat -> w j <> 0 -> norm d (v j) <= m) ->
  norm d (mean n w v) <= m.
Proof.
  intros Hw Hs Hv. unfold mean.
  rewrite (norm_ext d _ (fun c => / sum n w * sum n (fun j => w j * v j c))) by (intros; unfold Rdiv; ring).
  rewrite norm_scale, Rabs_right by (apply Rle_ge, Rlt_le, Rinv_0_lt_compat; assumption).
  apply Rmult_le_reg_l with (1 := Hs). rewrite <- Rmult_assoc, Rinv_r, Rmult_1_l by lra.
  apply Rle_trans with (1 := norm_sum d n (fun j c => w j * v j c)).
  rewrite Rmult_comm, <- sum_scale. apply sum_le. intros j Hj.
  rewrite norm_scale, Rabs_right by (apply Rle_ge; auto).
  destruct (Req_dec (w j) 0) as [->|E]; [lra|].
  rewrite (Rmult_comm m). apply Rmult_le_compat_l; auto.
Qed.

(* Softmax. *)

Lemma exp_sum_pos n s : (0 < n)%nat -> 0 < sum n (fun j => exp (s j)).
Proof. intros H. apply sum_pos; auto. intros. apply exp_pos. Qed.

Lemma exp_le x y : x <= y -> exp x <= exp y.
Proof. intros [H| ->]; [apply Rlt_le, exp_increasing, H | lra]. Qed.

Lemma ln_above x y : exp x <= y -> x <= ln y.
Proof.
  intros H. pose proof (exp_pos x). rewrite <- (ln_exp x). destruct H as [H| <-]; [|lra].
  apply Rlt_le, ln_increasing; assumption.
Qed.

Lemma softmax_pos n s i : (0 < n)%nat -> 0 < softmax n s i.
Proof. intros H. apply Rdiv_lt_0_compat; [apply exp_pos | apply exp_sum_pos, H]. Qed.

Lemma softmax_sum n s : (0 < n)%nat -> sum n (softmax n s) = 1.
Proof.
  intros H. unfold softmax, Rdiv. rewrite sum_scale_r. apply Rinv_r, Rgt_not_eq, exp_sum_pos, H.
Qed.

(* One weight, by the other scores relative to its own. *)
Lemma softmax_relative n s a :
  (a < n)%nat -> softmax n s a = 1 / (1 + sum n (but a (fun j => exp (s j - s a)))).
Proof.
  intros Ha. unfold softmax. pose proof (exp_pos (s a)) as He.
  rewrite (sum_but n a _ Ha).
  rewrite (sum_ext n (but a (fun j => exp (s j))) (fun j => exp (s a) * but a (fun j => exp (s j - s a)) j)).
  - rewrite sum_scale. set (r := sum n (but a (fun j => exp (s j - s a)))).
    assert (0 <= r).
    { apply sum_nonneg. intros i _. unfold but, others. destruct (Nat.eqb a i); [lra | apply Rlt_le, exp_pos]. }
    field. split; nra.
  - intros i _. unfold but, others. destruct (Nat.eqb a i); [ring|]. rewrite <- exp_plus. f_equal. ring.
Qed.

(* Orthonormal keys: what a stretched family scores, and what exponentials of two scores beside zeros sum to. *)
Lemma score_stretched n d k c i j :
  orthonormal n d k -> (i < n)%nat -> (j < n)%nat ->
  dot d (k i) (stretched c k j) =
    if Nat.eqb j 0 then c * (if Nat.eqb i 0 then 1 else 0) else if Nat.eqb i j then 1 else 0.
Proof.
  intros Hk Hi Hj. unfold stretched. destruct (Nat.eqb_spec j 0) as [->|E]; [|apply Hk; assumption].
  rewrite dot_comm, dot_scale, dot_comm, Hk by assumption. reflexivity.
Qed.

Lemma exp_sum_two n a b s :
  (a < n)%nat -> (b < n)%nat -> a <> b -> (forall j, (j < n)%nat -> j <> a -> j <> b -> s j = 0) ->
  sum n (fun j => exp (s j)) = exp (s a) + exp (s b) + (INR n - 2).
Proof.
  intros Ha Hb Hab Hs.
  rewrite (sum_ext n _ (fun j => chosen (Nat.eqb a) (fun j => exp (s j) - 1) j +
    chosen (Nat.eqb b) (fun j => exp (s j) - 1) j + 1)).
  - rewrite !sum_plus, !sum_chosen_one, sum_const by assumption. ring.
  - intros j Hj. unfold chosen.
    destruct (Nat.eqb_spec a j), (Nat.eqb_spec b j); [congruence | ring | ring |].
    rewrite Hs by auto. rewrite exp_0. ring.
Qed.

(* The mean by softmax weights is that by the exponentials themselves. *)
Lemma mean_softmax n s v c : (0 < n)%nat -> mean n (softmax n s) v c = mean n (fun j => exp (s j)) v c.
Proof.
  intros Hn. unfold mean. rewrite softmax_sum by exact Hn. unfold softmax. pose proof (exp_sum_pos n s Hn).
  rewrite (sum_ext n _ (fun j => / sum n (fun j => exp (s j)) * (exp (s j) * v j c)))
    by (intros; unfold Rdiv; ring).
  rewrite sum_scale. field. lra.
Qed.
