(* How near one hidden layer of rectified linear units comes to x^2 on [0, 1]: within 1/(2(2K+1)^2), and no nearer. *)

From Coq Require Import Lia Lra Psatz.
From avow Require Import sums.

Lemma relu_pos x : 0 <= x -> relu x = x.
Proof. apply Rmax_right. Qed.

Lemma relu_neg x : x <= 0 -> relu x = 0.
Proof. apply Rmax_left. Qed.

(* In units of 1/n: K hinges at the odd numbers stay between (y^2 - 1)/4 and y^2/4 up to 2K + 1. *)
Lemma hinges K y : 0 <= y <= 2 * INR K + 1 ->
  y * y - 1 <= 4 * sum K (fun i => relu (y - (2 * INR i + 1))) <= y * y.
Proof.
  induction K as [|K IH]; intros Hy.
  - simpl in *. nra.
  - rewrite S_INR in Hy. simpl. destruct (Rle_dec y (2 * INR K + 1)) as [H|H].
    + rewrite relu_neg by lra. specialize (IH ltac:(lra)). lra.
    + apply Rnot_le_lt in H.
      assert (Hall : forall J, (J <= S K)%nat ->
        sum J (fun i => relu (y - (2 * INR i + 1))) = INR J * y - INR J * INR J).
      { induction J as [|J IHJ]; intros HJ; [simpl; ring|]. simpl sum. rewrite IHJ by lia.
        rewrite S_INR. assert (INR J <= INR K) by (apply le_INR; lia). rewrite relu_pos by lra. ring. }
      specialize (Hall (S K) (le_n _)). simpl sum in Hall. rewrite Hall, S_INR. set (c := INR K + 1) in *.
      pose proof (Rmult_le_pos (2 * c + 1 - y) (y - 2 * c + 1) ltac:(lra) ltac:(unfold c; lra)).
      pose proof (Rle_0_sqr (y - 2 * c)) as Hs. unfold Rsqr in Hs. lra.
Qed.

(* On a stretch in which no unit bends the network upwards, the network is nowhere below its chord. *)
Definition bends_up (weight bias out : vector) (l r : R) (i : nat) : Prop :=
  0 < out i /\ (weight i * l + bias i) * (weight i * r + bias i) < 0.

Lemma concave K weight bias out shift l r :
  (forall i, (i < K)%nat -> ~ bends_up weight bias out l r i) ->
  network K weight bias out shift l + network K weight bias out shift r <=
  2 * network K weight bias out shift ((l + r) / 2).
Proof.
  intros H. unfold network.
  enough (sum K (fun i => out i * relu (weight i * l + bias i)) +
    sum K (fun i => out i * relu (weight i * r + bias i)) <=
    2 * sum K (fun i => out i * relu (weight i * ((l + r) / 2) + bias i))) by lra.
  rewrite <- sum_plus, <- sum_scale. apply sum_le. intros i Hi. specialize (H i Hi). unfold bends_up in H.
  replace (weight i * ((l + r) / 2) + bias i) with ((weight i * l + bias i + (weight i * r + bias i)) / 2) by field.
  set (a := weight i * l + bias i) in *. set (b := weight i * r + bias i) in *. set (v := out i) in *.
  assert (Hconvex : 2 * relu ((a + b) / 2) <= relu a + relu b).
  { unfold relu, Rmax. repeat destruct Rle_dec; lra. }
  destruct (Rle_dec v 0) as [Hv|Hv]; [nra|]. apply Rnot_le_lt in Hv.
  assert (Hab : 0 <= a * b) by (apply Rnot_lt_le; intros Hab; apply H; split; assumption).
  assert (2 * relu ((a + b) / 2) = relu a + relu b); [|nra].
  destruct (Rle_dec 0 a), (Rle_dec 0 b).
  - rewrite !relu_pos by lra. field.
  - assert (a = 0) as -> by nra. rewrite !(relu_neg b), (relu_neg 0), relu_neg by lra. ring.
  - assert (b = 0) as -> by nra. rewrite !(relu_neg a), (relu_neg 0), relu_neg by lra. ring.
  - rewrite !relu_neg by lra. ring.
Qed.

(* A line changes sign in at most one of two stretches. *)
Lemma one_stretch w b l r l' r' : l < r -> r <= l' -> l' < r' ->
  (w * l + b) * (w * r + b) < 0 -> (w * l' + b) * (w * r' + b) < 0 -> False.
Proof.
  intros Hlr Hr Hlr' H H'.
  destruct (Rle_dec 0 w) as [Hw|Hw].
  - assert (w * l <= w * r) by nra. assert (w * r <= w * l') by nra. assert (w * l' <= w * r') by nra.
    assert (0 < w * r + b) by nra. nra.
  - assert (w * r <= w * l) by nra. assert (w * l' <= w * r) by nra. assert (w * r' <= w * l') by nra.
    assert (w * r + b < 0) by nra. nra.
Qed.

(* Where at most one of each row's entries is 1 and the others are 0, and every column has a 1, no row is all 0. *)
Lemma every_row_has_one K (f : nat -> nat -> bool) :
  (forall i j j', (i < K)%nat -> (j < K)%nat -> (j' < K)%nat -> f i j = true -> f i j' = true -> j = j') ->
  (forall j, (j < K)%nat -> exists i, (i < K)%nat /\ f i j = true) ->
  forall i, (i < K)%nat -> exists j, (j < K)%nat /\ f i j = true.
Proof.
  intros Hone Hall i Hi.
  set (c := fun i j => if f i j then 1 else 0).
  assert (Hrow : forall i, (i < K)%nat -> sum K (c i) <= 1 /\
    ((exists j, (j < K)%nat /\ f i j = true) \/ sum K (c i) = 0)).
  { intros i' Hi'.
    assert (forall J, (J <= K)%nat -> (exists j, (j < J)%nat /\ f i' j = true /\ sum J (c i') = 1) \/ sum J (c i') = 0).
    { induction J as [|J IH]; intros HJ; [right; reflexivity|]. simpl. unfold c at 2 4.
      destruct (IH ltac:(lia)) as [(j & Hj & Hf & ->)| ->], (f i' J) eqn:E.
      - assert (j = J) by (apply (Hone i'); auto; lia). lia.
      - left. exists j. repeat split; [lia | assumption | ring].
      - left. exists J. repeat split; [lia | assumption | ring].
      - right. ring. }
    destruct (H K (le_n K)) as [(j & Hj & Hf & ->)| ->]; (split; [lra|]).
    - left. eauto.
    - right. reflexivity. }
  destruct (Hrow i Hi) as [_ [H|H]]; [exact H|]. exfalso.
  assert (Hlow : INR K <= sum K (fun j => sum K (fun i => c i j))).
  { replace (INR K) with (sum K (fun _ => 1)) by (rewrite sum_const; ring). apply sum_le. intros j Hj.
    destruct (Hall j Hj) as (i' & Hi' & Hf). apply Rle_trans with (c i' j); [unfold c; rewrite Hf; lra|].
    apply (sum_one K i' (fun i => c i j)); [exact Hi'|]. intros i'' _. unfold c. destruct (f i'' j); lra. }
  rewrite <- sum_swap, (sum_but K i _ Hi), H in Hlow.
  assert (sum K (but i (fun i => sum K (c i))) <= sum K (but i (fun _ => 1))).
  { apply sum_le. intros i' Hi'. unfold but, others. destruct (Nat.eqb i i'); [lra|]. apply Hrow, Hi'. }
  pose proof (sum_but K i (fun _ => 1) Hi) as E. rewrite sum_const in E. lra.
Qed.

Lemma all_or_one (P Q : nat -> Prop) K :
  (forall j, P j \/ Q j) -> (forall j, (j < K)%nat -> P j) \/ (exists j, (j < K)%nat /\ Q j).
Proof.
  intros H. induction K as [|K [IH|(j & Hj & Hq)]].
  - left. intros j Hj. lia.
  - destruct (H K) as [Hp|Hq]; [left|right; eauto with arith].
    intros j Hj. destruct (Nat.eq_dec j K) as [->|E]; [exact Hp|]. apply IH. lia.
  - right. exists j. split; [lia | exact Hq].
Qed.

Lemma far_from_square K weight bias out shift :
  let n := 2 * INR K + 1 in
  exists x, 0 <= x <= 1 /\ 1 / (2 * (n * n)) <= Rabs (network K weight bias out shift x - x * x).
Proof.
  intros n. pose proof (pos_INR K) as HK. assert (Hn : 1 <= n) by (unfold n; lra).
  set (e := 1 / (2 * (n * n))). set (f := network K weight bias out shift).
  assert (He : / n * / n = 2 * e) by (unfold e; field; lra).
  assert (Hinv : 0 < / n <= 1).
  { split; [apply Rinv_0_lt_compat; lra | rewrite <- Rinv_1; apply Rinv_le_contravar; lra]. }
  set (l := fun j => (2 * INR j + 1) * / n). set (r := fun j => (2 * INR j + 3) * / n).
  assert (Hlr : forall j, l j < r j) by (intros; unfold l, r; nra).
  assert (Hnext : forall i j, (i < j)%nat -> r i <= l j).
  { intros i j Hij. unfold l, r. apply Rmult_le_compat_r; [lra|]. pose proof (le_INR (S i) j Hij) as H.
    rewrite S_INR in H. lra. }
  assert (Hone : forall j, (j < K)%nat -> r j <= 1).
  { intros j Hj. unfold r. pose proof (le_INR (S j) K Hj) as H. rewrite S_INR in H.
    apply Rmult_le_reg_r with n; [lra|]. rewrite Rmult_assoc, Rinv_l by lra. unfold n. lra. }
  set (up := fun i j => if Rlt_dec 0 (out i) then
    if Rlt_dec ((weight i * l j + bias i) * (weight i * r j + bias i)) 0 then true else false else false).
  assert (Hup : forall i j, up i j = true <-> bends_up weight bias out (l j) (r j) i).
  { intros i j. unfold up, bends_up.
    destruct (Rlt_dec 0 (out i)); [destruct (Rlt_dec ((weight i * l j + bias i) * (weight i * r j + bias i)) 0)|];
      split; intros; (tauto || discriminate). }
  assert (Hpoint : forall x, 0 <= x <= 1 -> e <= Rabs (f x - x * x) \/ - e < f x - x * x < e).
  { intros x Hx. destruct (Rlt_le_dec (Rabs (f x - x * x)) e) as [H|H]; [right|left; exact H].
    apply Rabs_def2 in H. lra. }
  destruct (all_or_one (fun j => exists i, (i < K)%nat /\ up i j = true)
    (fun j => forall i, (i < K)%nat -> up i j = false) K)
    as [Hall|(j & Hj & Hnone)].
  { intros j. destruct (all_or_one (fun i => up i j = false) (fun i => up i j = true) K) as [H|H];
      [|right; exact H|left; exact H].
    intros i. destruct (up i j); auto. }
  - (* Every unit bends up behind 1/n, so the network does not climb before. *)
    assert (Hunits : forall i, (i < K)%nat -> exists j, (j < K)%nat /\ up i j = true).
    { apply every_row_has_one; [|exact Hall]. intros i j j' Hi Hj Hj' H H'. apply Hup in H, H'.
      destruct H as [_ H], H' as [_ H']. destruct (lt_eq_lt_dec j j') as [[E|E]|E]; [exfalso|exact E|exfalso].
      - exact (one_stretch _ _ _ _ _ _ (Hlr j) (Hnext _ _ E) (Hlr j') H H').
      - exact (one_stretch _ _ _ _ _ _ (Hlr j') (Hnext _ _ E) (Hlr j) H' H). }
    assert (Hfall : f (/ n) <= f 0).
    { unfold f, network. apply Rplus_le_compat_r, sum_le. intros i Hi.
      destruct (Hunits i Hi) as (j & Hj & H). apply Hup in H. destruct H as [Hout H].
      apply Rmult_le_compat_l; [lra|].
      assert (/ n <= l j) by (unfold l; pose proof (pos_INR j); nra). pose proof (Hlr j).
      destruct (Rle_dec 0 (weight i)) as [Hw|Hw].
      - assert (weight i * l j <= weight i * r j) by nra. assert (weight i * / n <= weight i * l j) by nra.
        assert (0 <= weight i * / n) by nra. assert (weight i * l j + bias i < 0) by nra.
        rewrite !relu_neg by lra. lra.
      - apply Rle_max_compat_l. nra. }
    destruct (Hpoint 0) as [H|H]; [lra|exists 0; split; [lra|exact H]|].
    destruct (Hpoint (/ n)) as [H'|H']; [lra|exists (/ n); split; [lra|exact H']|]. lra.
  - (* In stretch j nothing bends up, so the network is nowhere below its chord. *)
    assert (Hchord : f (l j) + f (r j) <= 2 * f ((l j + r j) / 2)).
    { apply concave. intros i Hi H. apply Hup in H. rewrite Hnone in H by exact Hi. discriminate. }
    specialize (Hone j Hj). specialize (Hlr j).
    assert (Hl : 0 <= l j) by (unfold l; pose proof (pos_INR j); nra).
    destruct (Hpoint (l j)) as [H|H]; [lra|exists (l j); split; [lra|exact H]|].
    destruct (Hpoint (r j)) as [H'|H']; [lra|exists (r j); split; [lra|exact H']|].
    destruct (Hpoint ((l j + r j) / 2)) as [H''|H'']; [lra|exists ((l j + r j) / 2); split; [lra|exact H'']|].
    assert (r j = l j + 2 * / n) by (unfold l, r; ring).
    assert (l j * l j + r j * r j - 2 * ((l j + r j) / 2 * ((l j + r j) / 2)) = 4 * e) by (rewrite H0; nra). lra.
Qed.

Theorem relu_square :
  (forall K x, 0 <= x <= 1 -> let n := 2 * INR K + 1 in
     Rabs (network K (fun _ => n) (fun i => - (2 * INR i + 1)) (fun _ => 4 / (n * n)) (1 / (2 * (n * n))) x - x * x)
     <= 1 / (2 * (n * n))) /\
  (* and no K units come nearer *)
  (forall K eps, squares K eps <-> 1 / (2 * ((2 * INR K + 1) * (2 * INR K + 1))) <= eps) /\
  (forall eps, 0 < eps -> exists K, squares K eps) /\
  squares 4 (1 / 10 ^ 2) /\ ~ squares 3 (1 / 10 ^ 2) /\
  squares 11 (1 / 10 ^ 3) /\ ~ squares 10 (1 / 10 ^ 3) /\
  squares 35 (1 / 10 ^ 4) /\ ~ squares 34 (1 / 10 ^ 4) /\
  squares 354 (1 / 10 ^ 6) /\ ~ squares 353 (1 / 10 ^ 6).
Proof.
  assert (Hwithin : forall K x, 0 <= x <= 1 -> let n := 2 * INR K + 1 in
     Rabs (network K (fun _ => n) (fun i => - (2 * INR i + 1)) (fun _ => 4 / (n * n)) (1 / (2 * (n * n))) x - x * x)
     <= 1 / (2 * (n * n))).
  { intros K x Hx n. pose proof (pos_INR K). assert (Hn : 1 <= n) by (unfold n; lra). unfold network.
    pose proof (hinges K (n * x) ltac:(unfold n in *; nra)) as Hh.
    rewrite (sum_ext K _ (fun i => 4 / (n * n) * relu (n * x - (2 * INR i + 1)))) by reflexivity.
    rewrite sum_scale. set (s := sum K (fun i => relu (n * x - (2 * INR i + 1)))) in *.
    replace (4 / (n * n) * s + 1 / (2 * (n * n)) - x * x)
      with ((4 * s - n * x * (n * x) + 1 / 2) * / (n * n)) by (field; lra).
    replace (1 / (2 * (n * n))) with (1 / 2 * / (n * n)) by (field; lra).
    assert (0 < / (n * n)) by (apply Rinv_0_lt_compat; nra).
    rewrite Rabs_mult, (Rabs_right (/ (n * n))) by lra. apply Rmult_le_compat_r; [lra|]. apply Rabs_le. lra. }
  assert (Hiff : forall K eps, squares K eps <-> 1 / (2 * ((2 * INR K + 1) * (2 * INR K + 1))) <= eps).
  { intros K eps. split.
    - intros (weight & bias & out & shift & H). destruct (far_from_square K weight bias out shift) as (x & Hx & Hfar).
      specialize (H x Hx). simpl in Hfar. lra.
    - intros H. eexists _, _, _, _. intros x Hx. apply Rle_trans with (2 := H). apply (Hwithin K x Hx). }
  split; [exact Hwithin|]. split; [exact Hiff|]. split.
  { intros eps Heps. destruct (archimed_cor1 eps Heps) as (K & HK & HK0). exists K. apply Hiff.
    assert (0 < INR K) by (apply lt_0_INR, HK0).
    apply Rle_trans with (/ INR K); [|lra]. unfold Rdiv. rewrite Rmult_1_l. apply Rinv_le_contravar; nra. }
  rewrite !Hiff. simpl. lra.
Qed.
