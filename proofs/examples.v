(* The hypotheses of the theorems can be met: nothing here holds because nothing fits. *)

From Coq Require Import Lia Lra Psatz.
From avow Require Import sums.

(* The standard basis is orthonormal, for any number of keys. *)
Example standard_basis n d : (n <= d)%nat -> orthonormal n d (fun i c => if Nat.eqb i c then 1 else 0).
Proof.
  intros Hd i j Hi Hj. unfold dot.
  rewrite (sum_ext d _ (chosen (Nat.eqb i) (fun c => if Nat.eqb j c then 1 else 0))).
  - rewrite sum_chosen_one by lia. rewrite Nat.eqb_sym. reflexivity.
  - intros c _. unfold chosen. destruct (Nat.eqb i c); ring.
Qed.

(* Inner products are a positive semidefinite kernel. *)
Example inner_product d : positive_semidefinite (dot d).
Proof.
  split; [apply dot_comm|]. intros n x c.
  replace (sum n (fun i => sum n (fun j => c i * c j * dot d (x i) (x j))))
    with (dot d (fun a => sum n (fun i => c i * x i a)) (fun a => sum n (fun i => c i * x i a)));
    [apply dot_nonneg|].
  unfold dot. transitivity (sum d (fun a => sum n (fun i => sum n (fun j => c i * x i a * (c j * x j a))))).
  - apply sum_ext. intros a _. rewrite <- sum_scale_r. apply sum_ext. intros i _. rewrite sum_scale. reflexivity.
  - rewrite sum_swap. apply sum_ext. intros i _. rewrite sum_swap. apply sum_ext. intros j _.
    rewrite <- sum_scale. apply sum_ext. intros. ring.
Qed.

(* The mean over n equally likely outcomes is an expectation. *)
Example uniform n : (0 < n)%nat -> expectation (fun _ : nat -> R => True) (fun X => sum n X / INR n).
Proof.
  intros Hn. assert (INR n <> 0) by (apply not_0_INR; lia). split.
  - intros a. split; [exact I|]. rewrite sum_const. field. assumption.
  - intros a b X Y _ _. split; [exact I|]. rewrite sum_plus, !sum_scale. field. assumption.
Qed.
