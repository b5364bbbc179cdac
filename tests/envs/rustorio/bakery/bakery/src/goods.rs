use bakery_goods::Good;

#[derive(Good)]
pub struct Brick;

#[derive(Good)]
pub struct Wheat;

#[derive(Good)]
pub struct Bread;
